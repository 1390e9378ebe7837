"""Refuses settings that the chosen kind of teacher or student would not read."""

from distill.config.settings import Config
from distill.runtime.errors import SettingError

FROM_TEACHER = ("layers", "pretrained", "custom")  # kinds of student that may be given numbers of layers


def check_unread(config: Config) -> None:
    """Refuse what the chosen kind of model would not read: the run would be another one than was asked for."""
    teacher, student = config.teacher, config.student
    saved = ("pretrained", "custom")
    for name, value, kind, wanting in (
        ("teacher.path", None if teacher.kind == "none" else teacher.path, teacher.kind, saved),
        ("teacher.tokenizer", None if teacher.kind == "none" else teacher.tokenizer, teacher.kind, saved),
        ("student.path", student.path, student.kind, saved),
        # A rule is a scale's default; numbers are the user's, and a student from random weights takes none of them.
        ("student.layers", student.layers if isinstance(student.layers, list) else None, student.kind, FROM_TEACHER),
        ("student.num_layers", student.num_layers, student.kind, ("layers",)),
        ("student.start", None if student.start == "random" else student.start, student.kind, ("config",)),
    ):
        wanted = wanting[0]
        if value is not None and kind not in wanting:
            model = name.partition(".")[0]
            raise SettingError(f"{name}={value} is not read with {model}.kind={kind}: choose {model}.kind={wanted}")
    for name in ("revision", "trust_remote_code"):  # a path and a tokenizer were refused above
        if teacher.kind == "several" and getattr(teacher, name):
            raise SettingError(
                f"teacher.{name}={getattr(teacher, name)} is not read with teacher.kind=several: set "
                f"teacher.members.NAME.{name}"
            )
