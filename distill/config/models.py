"""The settings of the models: the teacher or several, what is kept of its answers on disk, and the student."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic.json_schema import SkipJsonSchema

from distill.config.base import SEEDS, LocalPath, Refusal, Settings, setting
from distill.config.component import TARGET, Component, Part, group_named, in_group
from distill.config.errors import shown

BUNDLED = ("bundled_deep", "bundled_small")  # teachers that ship with this package, in folders of these names
MICRO_BATCHES: dict[str, Any] = {"ge": 1, "le": 10_000}
NEW = ("random", "neighbours")
LAYERS = ("auto", "every_second", "even", "first")  # what chooses layers of the teacher where their numbers do not
# The values of `student.init` that read a setting; all others read it, too.
READ_BY: dict[str, tuple[str, ...]] = {
    "architecture": ("layers", *NEW),
    **dict.fromkeys(("layers", "num_layers", "search_seconds", "intermediate_size", "refit"), ("layers",)),
    **dict.fromkeys(("path", "trust_remote_code"), ("pretrained",)),
}
# Of a server: no login, which would be taken for the host, no query, which would stand before what is asked for.
ADDRESS = re.compile(r"https?://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d+)?(/[^\s?#@]*)?")
OF_SERVER = ("model", "requests", "timeout", "api_key_env")  # settings of a teacher that a server has


KEPT = ("hidden_states", "top_k", "sampled")  # what a cache may keep of a teacher


class TeacherCacheConfig(Settings):
    """The teacher's answers on disk, for runs that see the same masked sequences several times; else it runs live."""

    hidden_states: bool = setting(False, "Keep the last hidden states in bf16, to which each step applies the head.")
    top_k: int | None = setting(None, "Keep this many of the largest probabilities; null: none.", ge=1, le=4_000_000)
    sampled: int | None = setting(None, "Draw this many other tokens; null: none.", ge=1, le=65_536)
    seed: int = setting(0, "Seed of the draws.", ge=0, le=SEEDS)
    gigabytes: float = setting(8.0, "Largest size on disk; more is refused before it runs.", unit="GB", gt=0, le=1e6)

    def refusals(self) -> Iterator[Refusal]:
        if self.sampled is None and self.seed:
            cure = "set sampled to a number beside it, or seed back to 0"
            yield ".seed", self.seed, "for sampled tokens, but sampled=null", cure
        for name, value in self.given("top_k", "sampled").items() if self.hidden_states else ():
            yield f".{name}", value, "beside hidden_states=true, which gives all probabilities", "leave out one of them"

    @property
    def wanted(self) -> bool:
        """Whether a cache is read in place of a teacher that runs."""
        return bool(self.given(*KEPT))


class FrozenModelConfig(Part):
    """Where a teacher comes from: a saved model, or a callable of the user's."""

    path: LocalPath | None = setting(
        None, "Folder of a model or run, Hub name, GGUF file, bundled_deep, bundled_small, smollm2, minilm; null: none."
    )
    revision: str | None = setting(None, "Revision of a model on the Hub.")
    trust_remote_code: bool = setting(False, "Let transformers run code of the model's repository.")
    tokenizer: LocalPath | None = setting(None, "Its folder or name on the Hub; null reads it beside the model.")
    context: str | None = setting(
        None, "Text in front of each document, which a causal teacher reads and the student does not.", min_length=1
    )
    url: str | None = setting(
        None,
        "Of vLLM with this model, such as http://localhost:8000/v1, or of SGLang: http://localhost:30000/generate.",
    )
    model: str | None = setting(None, "Its name on that server.")
    requests: int = setting(8, "Requests to that server at a time.", ge=1, le=1024)
    timeout: float = setting(120.0, "Without an answer, before a request is repeated.", unit="seconds", gt=0, le=1e5)
    api_key_env: str | None = setting(None, "Environment variable with that server's key, such as OPENAI_API_KEY.")

    @property
    def served(self) -> bool:
        """Whether it runs elsewhere, on a server."""
        return self.target is None and self.url is not None

    @property
    def bundled(self) -> bool:
        """Whether it ships with this package."""
        return self.target is None and self.path in BUNDLED

    @property
    def saved(self) -> bool:
        """Whether it is a saved model of the user's or of the Hub."""
        return self.target is None and self.path is not None and not self.bundled

    @property
    def custom(self) -> Component | None:
        """What makes it, where that is a callable of the user's."""
        if self.target is None:
            return None
        given = {name: getattr(self, name) for name in ("path", "revision", "trust_remote_code")}
        given |= self.given("url", *OF_SERVER)  # names that a callable may have, too
        return self.component("", given, tuple(given))

    def refusals(self) -> Iterator[Refusal]:
        if self.target is None:
            self.refuse_arguments()
            yield from self._of_server()
        if self.target is None and not self.saved and not self.served:
            for name, value in self.given("revision", "trust_remote_code", "tokenizer").items():
                problem = f"not read with {self.group}.path={shown(self.path)}"
                yield f".{name}", value, problem, "give the path of a saved model, or leave it out"

    def _of_server(self) -> Iterator[Refusal]:
        if self.url is None:
            for name, value in self.given(*OF_SERVER).items():
                yield f".{name}", value, f"not read with {self.group}.url=null", "give a URL, or leave it out"
            return
        if ADDRESS.fullmatch(self.url) is None:
            yield ".url", self.url, "no URL of a server alone", "give one such as http://localhost:8000/v1"
        if self.api_key_env is not None and not self.api_key_env.isidentifier():  # it may be the key itself
            yield ".api_key_env", None, "no name of a variable", "give its name, such as OPENAI_API_KEY, and no key"
        for name, value in self.given("path", "revision").items():
            yield f".{name}", value, f"beside {self.group}.url", "give one of the two"
        if self.model is None:
            yield ".model", "null", "names no model of the server", "give its name there"
        if self.tokenizer is None:
            yield ".tokenizer", "null", "a server gives token ids alone", "give the folder or Hub name of its tokenizer"


class MemberConfig(FrozenModelConfig):
    """One of several teachers: what it is, how it runs, and what it counts."""

    weight: float = setting(1.0, "Weight in the mean of all; weights are divided by their sum.", gt=0, le=1e6)
    sources: list[str] | None = setting(None, "Sources of corpus=mixture whose sequences it teaches; null: all.")
    precision: Literal["fp32", "bf16", "fp16"] | None = setting(None, "Its number format; null: the teacher's.")
    micro_batches: int | None = setting(None, "Of one forward; null is teacher.micro_batches.", **MICRO_BATCHES)
    cache: TeacherCacheConfig | None = setting(None, "Its answers on disk; null is teacher.cache.")

    def refusals(self) -> Iterator[Refusal]:
        yield from super().refusals()
        if self.target is None and self.path is None and not self.served:
            yield ".path", "null", "names no model", "give a path, or bundled_deep"


class TeacherConfig(FrozenModelConfig):
    """The only teacher, several whose probabilities are averaged, or none."""

    group: SkipJsonSchema[str] = group_named("teacher")
    micro_batches: int = setting(1, "Micro-batches that one forward of the teacher takes.", **MICRO_BATCHES)
    cache: TeacherCacheConfig = setting(TeacherCacheConfig, "The teacher's answers on disk, for repeated sequences.")
    # Layers and hidden states are those of the first.
    members: Annotated[dict[str, MemberConfig], BeforeValidator(in_group("teacher.members"))] = setting(
        dict, "Several teachers by name, in place of one: their probabilities are averaged."
    )

    @property
    def is_none(self) -> bool:
        """Whether there is no teacher: the student learns from the text, or from the labels, alone."""
        return self.target is None and self.path is None and self.url is None and not self.members

    def refusals(self) -> Iterator[Refusal]:
        yield from super().refusals()
        if self.is_none:
            cached = {f"cache.{name}": value for name, value in self.cache.given(*KEPT).items()}
            for name, value in (self.given("micro_batches", "context") | cached).items():
                yield f".{name}", value, "not read with teacher.path=null", "choose a teacher, or leave it out"
        for name, model in (("path", self.path), (TARGET, self.target), ("url", self.url), ("context", self.context)):
            if self.members and model is not None:
                cure = f"set it to null, or name this teacher as teacher.members.NAME.{name}"
                yield f".{name}", model, "beside teacher.members", cure


class StudentConfig(Part):
    """The model to train. `init` says where its weights come from, unless a callable of the user's makes it."""

    group: SkipJsonSchema[str] = group_named("student")
    # With neighbours the heads of the first layer attend to the tokens beside, `distill.models.student`.
    init: Literal["layers", "random", "neighbours", "pretrained"] = setting(
        "layers",
        "Its weights at first: layers of the teacher, random, random that attend to neighbours, or saved ones.",
    )
    architecture: str = setting("same", "A transformers model type, or same (as the teacher), unless it is new.")
    # `auto` takes those that cost least by the untrained student's loss; rules: every_second (also null), even, first.
    layers: Any = setting(None, "Teacher layers to start from: auto, their numbers, or a rule.")
    num_layers: int | None = setting(None, "Layers that a rule or auto takes; null is half.", ge=1, le=10_000)
    # With it the layers depend on how fast the machine is; the same settings find the same ones without.
    search_seconds: float | None = setting(
        None, "The longest search of layers=auto; null: no limit.", unit="seconds", ge=1, le=1e6
    )
    intermediate_size: int | None = setting(
        None, "Neurons of the teacher's MLPs that stay, those that add most to its states; null: all.", ge=1, le=10**7
    )
    # `auto` refits causal students of families that are known.
    refit: bool | Literal["auto"] = setting(
        False,
        "Fit blocks with fewer neurons or layers behind them to the teacher, by least squares: true, false, auto.",
    )
    path: LocalPath | None = setting(None, "Folder of a model or run, or name on the Hub; weights for a callable.")
    trust_remote_code: bool = setting(False, "Let transformers run code of the model's repository.")
    config: dict[str, Any] = setting(dict, "Fields of the transformers configuration.")
    frozen: list[Any] = setting(list, "Parts that stay as they start: embeddings, and layers by number, from 0.")
    dropout: float | None = setting(None, "Dropout; null is 0.1, or what a saved or custom model has.", ge=0, lt=1)
    # Another one than the teacher's is for losses that need no pair of tokens, such as `pooled`.
    tokenizer: LocalPath | None = setting(
        None, "Folder or Hub name, or corpus (trained on it); null is a saved student's own, else the teacher's."
    )
    gradient_checkpointing: bool = setting(False, "Keep the inputs of layers alone; the backward computes the rest.")

    @property
    def custom(self) -> Component | None:
        """What makes it, where that is a callable of the user's."""
        if self.target is None:
            return None
        given = self.given(*READ_BY, "config", "frozen", "dropout")
        return self.component("", given, tuple(given))

    @property
    def from_layers(self) -> bool:
        """Whether it starts from layers of the teacher."""
        return self.target is None and self.init == "layers"

    @property
    def is_new(self) -> bool:
        """Whether it starts from new weights of a transformers model."""
        return self.target is None and self.init in NEW

    @property
    def is_saved(self) -> bool:
        """Whether it starts from a saved model."""
        return self.target is None and self.init == "pretrained"

    def refusals(self) -> Iterator[Refusal]:
        if self.target is not None:
            return
        self.refuse_arguments()
        for name, value in self.given(*READ_BY).items():
            if self.init not in READ_BY[name]:
                cure = f"choose student={READ_BY[name][0]}, or set it to {shown(type(self).model_fields[name].default)}"
                yield f".{name}", value, f"not read with student.init={self.init}", cure
        if self.layers not in (None, *LAYERS) and not (self.layers and _are_numbers(self.layers)):
            cure = f"give numbers such as [0,2,4], or one of {', '.join(LAYERS)}"
            yield ".layers", self.layers, "not known", cure
        if not _are_numbers([part for part in self.frozen if part != "embeddings"]):
            yield ".frozen", self.frozen, "not known", "give embeddings, and numbers of layers, from 0"


def _are_numbers(layers: Any) -> bool:
    """Whether these are numbers of layers."""
    return isinstance(layers, list) and all(type(layer) is int and layer >= 0 for layer in layers)
