"""espeak-ng, from the library inside the package `espeakng-loader`."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from ....common.errors import DataError, LuthierError, missing_extra

# From espeak-ng's speak_lib.h.
_SYNCHRONOUS, _DONT_EXIT = 2, 0x8000
_RATE, _PITCH = 1, 3
_UTF8, _CHARACTERS = 1, 1
_SYNTH_ARGUMENTS = (
    *(ctypes.c_char_p, ctypes.c_size_t),  # text, its size with the final zero
    *(ctypes.c_uint, ctypes.c_int, ctypes.c_uint, ctypes.c_uint),  # begin, unit of begin, end, flags
    *(ctypes.c_void_p, ctypes.c_void_p),  # identifier, user data
)
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Engine:
    """One espeak-ng with a state of its own: the same calls in the same order give the same samples.

    The library keeps the phase of its oscillators from one text to the next and can't be reset, so each engine loads
    a copy of it. Not safe for use by several threads at once.
    """

    def __init__(self) -> None:
        try:
            import espeakng_loader  # type: ignore[import-untyped]
        except ImportError as error:
            raise missing_extra("espeakng-loader", "demo") from error
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows can't delete what is loaded
            self._library = ctypes.CDLL(shutil.copy(espeakng_loader.get_library_path(), folder))
        self._data = Path(espeakng_loader.get_data_path())
        #: samples a second
        self.rate = int(self._library.espeak_Initialize(_SYNCHRONOUS, 0, str(self._data).encode(), _DONT_EXIT))
        if self.rate <= 0:
            raise LuthierError("espeak-ng does not start", where=self._data, do="reinstall espeakng-loader")
        self._library.espeak_Synth.argtypes = _SYNTH_ARGUMENTS
        self._library.espeak_ng_SetRandSeed.argtypes = [ctypes.c_long]
        self._library.espeak_ng_SetRandSeed(1)  # it is the time otherwise
        self._chunks: list[NDArray[np.int16]] = []
        self._callback = _CALLBACK(self._receive)  # kept: the library holds only its address
        self._library.espeak_SetSynthCallback(self._callback)

    def say(self, text: str, voice: str, rate_wpm: int, pitch: int) -> NDArray[np.float32]:
        """Speak a text.

        Args:
            text: what is said.
            voice: a language with a variant of the voice, such as `en-us+f3`.
            rate_wpm: speed in words a minute, 80 to 450.
            pitch: 0 to 100; 50 is the voice's own.

        Returns:
            samples in [-1, 1], `[T]`, at `rate`.
        """
        self._choose(voice)
        self._library.espeak_SetParameter(_RATE, rate_wpm, 0)
        self._library.espeak_SetParameter(_PITCH, pitch, 0)
        self._chunks.clear()
        encoded = text.encode()
        if self._library.espeak_Synth(encoded, len(encoded) + 1, 0, _CHARACTERS, 0, _UTF8, None, None) != 0:
            raise DataError("espeak-ng can't speak this text", given=repr(text))
        samples = np.concatenate([np.zeros(0, np.int16), *self._chunks])
        return samples.astype(np.float32) / np.float32(32768)

    def _choose(self, voice: str) -> None:
        variant = voice.partition("+")[2]
        known = not variant or (self._data / "voices" / "!v" / variant).is_file()  # espeak-ng ignores an unknown one
        if not known or self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise DataError("espeak-ng has no such voice", given=voice, expected="such as en-us or en-us+f3")

    def _receive(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _events: int | None) -> int:
        if samples and count > 0:
            self._chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0  # go on
