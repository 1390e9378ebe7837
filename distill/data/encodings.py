"""The encodings in which plain files can be read."""

import codecs

from distill.runtime.errors import SettingError


def check_encoding(encoding: str | None, setting: str) -> None:
    """Raises SettingError where files cannot be read in this encoding; `setting` names their source."""
    if encoding is None:
        return
    try:
        if codecs.lookup(encoding).name == "utf-8-sig":  # a byte order mark is dropped from any UTF-8
            return
        readable = "\n".encode(encoding) == b"\n"
        if readable:  # some can only be strict
            codecs.getincrementaldecoder(encoding)(errors="replace").decode(b"\xff\n", True)
    except (LookupError, ValueError):
        raise SettingError(
            f"{setting}.encoding={encoding} is no encoding of Python: write gb18030, cp1252, shift_jis ..."
        ) from None
    if not readable:
        raise SettingError(
            f"{setting}.encoding={encoding} does not end lines with one byte 10: convert the files to UTF-8, as with "
            f"`iconv -f {encoding} -t UTF-8`"
        )
