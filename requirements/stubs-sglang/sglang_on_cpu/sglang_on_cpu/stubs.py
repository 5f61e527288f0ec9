"""Modules that can be imported and say clearly that they cannot be run."""

import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable, Sequence
from typing import Any


class StubFunction:
    """A decorator, an annotation or a constant; whatever a module does with a name while it is imported."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # @triton.jit
        return lambda function: function  # @triton.autotune(...)

    def __getattr__(self, name: str) -> "StubFunction":
        if name.startswith("__"):
            raise AttributeError(name)
        return StubFunction(f"{self.__name__}.{name}")

    def __getitem__(self, item: Any) -> "StubFunction":
        return self

    def __or__(self, other: Any) -> "StubFunction":
        return self

    __ror__ = __or__


class StubMeta(type):
    """Attributes of stub classes are strings: members of an enumeration, keys of a dict."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StubClass(metaclass=StubMeta):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Whatever the real one takes."""


class StubModule(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = StubFunction(f"{self.__name__}.{name}")
        if name[:1].isupper():
            value = StubMeta(name, (StubClass,), {"__module__": self.__name__})
        elif self.__name__ == "triton" and name in ARITHMETIC:
            value = ARITHMETIC[name]
        setattr(self, name, value)
        return value


# Plain functions that SGLang calls outside of kernels.
ARITHMETIC: dict[str, Callable[..., int]] = {
    "cdiv": lambda a, b: -(a // -b),
    "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
}


class KernelModule(types.ModuleType):
    """`sgl_kernel`. Names of CPU kernels exist and refuse to run; any other name is an ImportError, for which
    SGLang has its own ways round. Without AMX operators every layer takes its torch implementation."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_cpu" not in name:
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"sgl_kernel.{name} is not in this environment; it is a stub for imports")

        return missing


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    pool_len: int,
) -> None:
    """The one CPU kernel that serving a text model needs: row r of the table takes its slots [start, end)."""
    taken = 0
    for i, row in enumerate(req_pool_indices.tolist()):
        start, end = int(start_offset[i]), int(end_offset[i])
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


class _Loader(importlib.abc.Loader):
    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class StubFinder(importlib.abc.MetaPathFinder):
    def __init__(self, roots: set[str]) -> None:
        self._roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(StubModule(fullname)), is_package=True)


class KernelFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "sgl_kernel":
            return None
        module = KernelModule(fullname)
        setattr(module, "assign_req_to_token_pool_cpu", assign_req_to_token_pool_cpu)  # noqa: B010
        return importlib.machinery.ModuleSpec(fullname, _Loader(module))
