"""What `torch.cuda` offers, for the simulated device: also the module of a backend of another name."""

import ctypes
import os
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch

from .library import Knob, Library

Device = Any  # torch.device, its name, its index, None: the current one


class CudaError(IntEnum):
    """What calls of the runtime return."""

    success = 0
    invalid_value = 1


class Runtime:
    """The part of CUDA's runtime that programs call by themselves."""

    cudaError = CudaError

    def __init__(self, library: Library) -> None:
        self._library = library

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> CudaError:
        """Lock pages that the program owns."""
        self._library.check(self._library.register_host(address, nbytes))
        return CudaError.success

    def cudaHostUnregister(self, address: int) -> CudaError:
        """Unlock them. Raises RuntimeError while a copy uses them: a GPU would read or write on."""
        result = self._library.unregister_host(address)
        self._library.check(result == 2)
        return CudaError(result)

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._library.memory_information(device, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def stream_class(kind: str, index: Callable[[Device], int]) -> type[torch.Stream]:
    """`torch.cuda.Stream`."""

    class Stream(torch.Stream):
        def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> "Stream":
            if kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, torch.device(kind, index(device)), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        @property
        def priority(self) -> int:
            return 0

    return Stream


class _OfEvents(type):
    """`torch.Event.elapsed_time` takes no object of a subclass: what is made is a `torch.Event`, and an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event)


def event_class(kind: str) -> type:
    """`torch.cuda.Event`."""

    class Event(metaclass=_OfEvents):
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> torch.Event:
            return torch.Event(torch.device(kind), enable_timing=enable_timing)

    return Event


class StreamContext:
    """Makes a stream and its device the current ones."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> torch.Stream | None:
        if self._stream is not None:
            self._device = torch.accelerator.current_device_index()
            self._before = torch.accelerator.current_stream(self._stream.device_index)
            torch.accelerator.set_stream(self._stream)
        return self._stream

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._before)
            torch.accelerator.set_device_index(self._device)


def storages_of_the_device(kind: str) -> None:
    """`torch.load` makes storages by the device's name, which a PyTorch without CUDA knows only of tensors."""
    original = torch.UntypedStorage.__new__

    def made(cls: type, *args: Any, device: Device = None, **kwargs: Any) -> torch.UntypedStorage:
        if device is not None and torch.device(device).type == kind:
            return torch.empty(*args or (0,), dtype=torch.uint8, device=device).untyped_storage()
        return original(cls, *args, **kwargs) if device is None else original(cls, *args, device=device, **kwargs)

    torch.UntypedStorage.__new__ = made


class Functions:
    """The functions of the module. Their docstrings are PyTorch's."""

    def __init__(self, library: Library, kind: str) -> None:
        self._library = library
        self._kind = kind
        self._runtime = Runtime(library)
        self.Stream = stream_class(kind, self._index)
        self.Event = event_class(kind)
        self.StreamContext = StreamContext
        library.default_generators(True)
        self.default_generators = tuple(torch.Generator(f"{kind}:{k}") for k in range(library.knob(Knob.DEVICES)))
        library.default_generators(False)
        functions = self

        class device:
            def __init__(self, device: Device) -> None:
                self.idx = functions._index(device, optional=False)
                self.prev_idx = -1

            def __enter__(self) -> None:
                self.prev_idx = functions.current_device()
                if self.idx >= 0:
                    functions.set_device(self.idx)

            def __exit__(self, *_: object) -> None:
                functions.set_device(self.prev_idx)

        self.device = device

    def public(self) -> dict[str, Any]:
        """Everything by its name in `torch.cuda`."""
        names = {name for name in dir(self) if not name.startswith("_")} - {"public"}
        found = {name: getattr(self, name) for name in names}
        hidden = ("_is_in_bad_fork", "_lazy_init", "_sleep", "_exchange_device", "_maybe_exchange_device")
        return found | {name: getattr(self, name) for name in hidden}

    def _index(self, device: Device, optional: bool = True) -> int:
        if device is None and optional:
            return self.current_device()
        if isinstance(device, int):
            return device if device >= 0 or not optional else self.current_device()
        device = torch.device(device)
        return self.current_device() if device.index is None else device.index

    # ---- devices
    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None: ...

    def _lazy_init(self) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return os.getpid() != self._process

    _process = os.getpid()

    def device_count(self) -> int:
        return self._library.knob(Knob.DEVICES)

    def current_device(self) -> int:
        return self._library.device()

    def set_device(self, device: Device) -> None:
        self._library.check(self._library.set_device(self._index(device)))

    def _exchange_device(self, device: int) -> int:
        before = self.current_device()
        self.set_device(device) if device >= 0 else None
        return before

    _maybe_exchange_device = _exchange_device

    def get_device_properties(self, device: Device = None) -> SimpleNamespace:
        _, total = self.mem_get_info(device)
        return SimpleNamespace(
            name="Simulated GPU", total_memory=total, major=9, minor=0, multi_processor_count=132, warp_size=32,
            L2_cache_size=50 << 20, is_integrated=0, is_multi_gpu_board=0, gcnArchName="",
        )  # fmt: skip

    def get_device_name(self, device: Device = None) -> str:
        return "Simulated GPU"

    def get_device_capability(self, device: Device = None) -> tuple[int, int]:
        return (9, 0)

    def can_device_access_peer(self, device: Device, peer: Device) -> bool:
        return True

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def is_current_stream_capturing(self) -> bool:
        return False

    def synchronize(self, device: Device = None) -> None:
        torch.accelerator.synchronize(self._index(device))

    def _sleep(self, cycles: int) -> None:
        self._library.sleep(int(cycles / 1.5e3))  # of a card with 1.5 GHz

    def cudart(self) -> Runtime:
        # Starts the device up, as CUDA's own does: `is_pinned` says no before.
        torch.empty(1, pin_memory=True, device="cpu")
        return self._runtime

    # ---- streams
    def stream(self, stream: torch.Stream | None) -> StreamContext:
        return StreamContext(stream)

    def _stream(self, index: int, stream_id: int, device_type: int) -> torch.Stream:
        return self.Stream(stream_id=stream_id, device_index=index, device_type=device_type)

    def current_stream(self, device: Device = None) -> torch.Stream:
        found = torch.accelerator.current_stream(self._index(device))
        return self._stream(found.device_index, found.stream_id, found.device_type)

    def default_stream(self, device: Device = None) -> torch.Stream:
        index = self._index(device)
        return self._stream(index, 0, torch.accelerator.current_stream(index).device_type)

    def set_stream(self, stream: torch.Stream | None) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)

    # ---- memory
    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def memory_allocated(self, device: Device = None) -> int:
        return torch.accelerator.memory_allocated(self._index(device))

    def max_memory_allocated(self, device: Device = None) -> int:
        return torch.accelerator.max_memory_allocated(self._index(device))

    def memory_reserved(self, device: Device = None) -> int:
        return torch.accelerator.memory_reserved(self._index(device))

    def max_memory_reserved(self, device: Device = None) -> int:
        return torch.accelerator.max_memory_reserved(self._index(device))

    def memory_stats(self, device: Device = None) -> dict[str, Any]:
        return torch.accelerator.memory_stats(self._index(device))

    def memory_stats_as_nested_dict(self, device: Device = None) -> dict[str, Any]:
        return torch._C._accelerator_getDeviceStats(self._index(device))

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        torch.accelerator.reset_peak_memory_stats(self._index(device))

    def reset_accumulated_memory_stats(self, device: Device = None) -> None:
        torch.accelerator.reset_accumulated_memory_stats(self._index(device))

    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        return self._runtime.cudaMemGetInfo(self._index(device))

    def set_per_process_memory_fraction(self, fraction: float, device: Device = None) -> None:
        index = self._index(device)
        self._library.set_limit(index, int(fraction * self.mem_get_info(index)[1]))

    def memory_snapshot(self, mempool_id: object = None) -> list[dict[str, Any]]:
        """Segments with their blocks."""
        segments: dict[tuple[int, int], dict[str, Any]] = {}
        for index in range(self.device_count()):
            for line in self._library.blocks(index).decode().splitlines():
                address, size, stream, used, start, total = map(int, line.split("\t"))
                new = {"device": index, "address": start, "total_size": total, "stream": stream, "blocks": []}
                segment = segments.setdefault((index, start), new)
                state = "active_allocated" if used else "inactive"
                segment["blocks"].append({"address": address, "size": size, "state": state})
        return list(segments.values())

    def host_memory_stats(self) -> dict[str, Any]:
        """Page-locked memory of the allocator, by the names of PyTorch 2.13 and those before it."""
        numbers = (ctypes.c_int64 * 18)()
        self._library.host_memory(numbers)
        found: dict[str, Any] = {"num_host_alloc": numbers[16], "num_host_free": numbers[17]}
        for k, name in enumerate(("allocations", "allocated_bytes", "active_requests", "active_bytes")):
            for i, part in enumerate(("current", "peak", "allocated", "freed")):
                found[f"{name}.{part}"] = numbers[4 * k + i]
        return found | {f"reserved_bytes.{part}": found[f"allocated_bytes.{part}"] for part in ("current", "peak")}

    # ---- random numbers
    def _generator(self, device: Device) -> torch.Generator:
        return self.default_generators[self._index(device)]

    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Device = None) -> None:
        self._generator(device).set_state(new_state.clone(memory_format=torch.contiguous_format))

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def manual_seed(self, seed: int) -> None:
        self._generator(None).manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(int(seed))

    def initial_seed(self) -> int:
        return self._generator(None).initial_seed()

    def seed(self) -> None:
        self._generator(None).seed()

    def seed_all(self) -> None:
        for generator in self.default_generators:
            generator.seed()
