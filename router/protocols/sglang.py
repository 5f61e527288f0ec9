"""SGLang's prefill-decode disaggregation: the same request to both, meeting in a bootstrap room.

SGLang 0.5.23 (srt/disaggregation, its mini_lb): both bodies carry the prefill engine's bootstrap server and a
room number drawn for this try. Decode engines cannot prefill. With data parallelism the prefill rank is
room % dp_size: random rooms spread over ranks, and a room of the right remainder reaches a chosen one.

Several prompts in one body get the rooms that follow. Several samples of one prompt (`n`) all get the same
room: the first ends, and the decode engine waits for the others until it times out (sgl-project/sglang#30723,
#40297).
"""

import secrets

from router.instance import Instance
from router.protocols.bodies import num_samples, with_field, write_fields
from router.protocols.pair import PairBodies, PairExchange

_ROOM_BITS = 63


class SglangExchange(PairExchange):
    def unservable(self) -> str:
        samples = num_samples(self.fields)
        if samples == 1:
            return ""
        return (
            f"n={samples}: SGLang's prefill and decode engines serve one sample of a prompt in a request;"
            f" send {samples} requests"
        )

    def bodies(self, prefill: Instance) -> PairBodies:
        fields = with_field(self.fields, "bootstrap_host", prefill.pool.host)
        fields = with_field(
            fields, "bootstrap_port", prefill.spec.bootstrap_port or self.services.config.bootstrap_port
        )
        room, rank = secrets.randbits(_ROOM_BITS), prefill.spec.dp_rank
        if rank is not None:
            ranks = self.services.cluster.num_ranks(prefill.spec.base_url)
            room = room - room % ranks + rank
            room = room if room < 1 << _ROOM_BITS else room - ranks
        body = write_fields(with_field(fields, "bootstrap_room", room))
        return PairBodies(body, body)
