"""SGLang's prefill-decode disaggregation: the same request to both, meeting in a bootstrap room.

SGLang 0.5.23 (srt/disaggregation, its mini_lb): both bodies carry the prefill engine's bootstrap server and a
room number drawn for this try. Decode engines cannot prefill. With data parallelism the rank is
room % dp_size, so random rooms spread over ranks.
"""

import secrets

from router.instance import Instance
from router.protocols.bodies import with_field, write_fields
from router.protocols.pair import PairExchange

_ROOM_BITS = 63


class SglangExchange(PairExchange):
    def bodies(self, prefill: Instance) -> tuple[bytes, bytes]:
        fields = with_field(self.fields, "bootstrap_host", prefill.pool.host)
        fields = with_field(fields, "bootstrap_port", self.services.config.bootstrap_port)
        body = write_fields(with_field(fields, "bootstrap_room", secrets.randbits(_ROOM_BITS)))
        return body, body
