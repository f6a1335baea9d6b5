"""Stand-ins for libraries that a command imports for their names alone: a print of a configuration needs signatures."""

import sys
from abc import ABCMeta
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from types import ModuleType
from typing import Any

HEAVY = (
    "accelerate",
    "peft",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchmetrics",
    "transformers",
    "triton",
)
"""What the modules of a training and Lightning import for seconds, and what a print needs the names of at most."""


class StandIn(ABCMeta):
    """What a library's name stands for until somebody looks into it: it can be named, annotated and inherited from.

    While modules are imported, a call of it does nothing: by such calls they make themselves known to the library.
    Afterwards whatever is asked of it, as whether a class is its subclass, loads the library and is answered by what
    the library has under that name. A class that inherits from it is good for being named alone.
    """

    library: "Library"
    place: tuple[str, str]
    """The module, and the name in it."""

    @property
    def stands(cls) -> bool:
        """Whether this is a stand-in, and not a class that inherits from one."""
        return "place" in vars(cls)

    @property
    def real(cls) -> Any:
        """What the library has under that name."""
        module, name = cls.place
        return attrgetter(name)(cls.library.loaded(module))

    def __getattr__(cls, name: str) -> Any:
        if not cls.stands or name.startswith("_"):
            raise AttributeError(name)
        module, within = cls.place
        return stand_in(cls.library, module, f"{within}.{name}") if cls.library.stands else getattr(cls.real, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.stands:
            return super().__call__(*args, **kwargs)
        return None if cls.library.stands else cls.real(*args, **kwargs)

    def register(cls, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do what the library's own method of this name does, which is not that of abstract classes."""
        return cls.__getattr__("register")(*args, **kwargs) if cls.stands else super().register(*args, **kwargs)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if not cls.stands:
            return super().__subclasscheck__(subclass)
        # What inherits from a library's class has that among its bases, so the library is loaded.
        return any(cls.library.has(base.__module__) for base in subclass.__mro__) and issubclass(subclass, cls.real)

    def __instancecheck__(cls, instance: Any) -> bool:
        return issubclass(type(instance), cls)


def stand_in(library: "Library", module: str, name: str) -> StandIn:
    """Return what stands for a name in a module, which may be one of an object there: `AutoConfig.register`."""
    return StandIn(name.rpartition(".")[2], (), {"library": library, "place": (module, name), "__module__": module})


class Names(ModuleType):
    """A module of which every name is a stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return metadata.version(self.__name__)
        if name.startswith("__"):
            raise AttributeError(name)
        assert self.__spec__ is not None
        assert isinstance(self.__spec__.loader, Library)
        value = stand_in(self.__spec__.loader, self.__name__, name)
        setattr(self, name, value)
        return value


class Library(Loader):
    """Finds a library's modules as modules of stand-ins.

    Args:
        name: the package.
    """

    def __init__(self, name: str) -> None:
        self.name, self.stands = name, True

    def has(self, module: str) -> bool:
        """Return whether a module of that name is the library's."""
        return f"{module}.".startswith(f"{self.name}.")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return how to make a module of stand-ins, None for any other library's."""
        return ModuleSpec(name, self, is_package=True) if self.has(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of stand-ins."""
        return Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is."""

    def leave(self) -> None:
        """Let the library be imported for what it is from now on; modules that hold a stand-in keep it."""
        if self.stands:
            self.stands = False
            sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
            for name in [name for name, module in sys.modules.items() if isinstance(module, Names)]:
                if self.has(name):
                    del sys.modules[name]
                    above, _, last = name.rpartition(".")
                    if above in sys.modules:  # that a module is imported makes it an attribute of the one above it
                        vars(sys.modules[above]).pop(last, None)

    def loaded(self, module: str) -> ModuleType:
        """Return a module of the library itself."""
        self.leave()
        return import_module(module)


@contextmanager
def stand_ins(libraries: Iterable[str]) -> Iterator[None]:
    """Let libraries be of stand-ins while modules that use them are imported.

    A library that is loaded already, or is not installed, stays what it is. The modules that are imported meanwhile
    keep their stand-ins, so this is for a process that computes nothing and ends.

    Args:
        libraries: names of packages, or of packages within one.
    """
    there = [
        Library(name) for name in libraries if name not in sys.modules and PathFinder.find_spec(name.split(".")[0])
    ]
    sys.meta_path[:0] = there  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        yield
    finally:
        for library in there:
            library.leave()
