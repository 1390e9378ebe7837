"""Bad values on the command line, a long table of them: each is refused with one line that names its setting."""

from collections.abc import Iterator

import pytest
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from distill.config.command_line import CommandLine, check_overrides
from distill.config.compose import build, register
from distill.config.composition import compose_overrides
from distill.config.settings import CONF, Config
from distill.config.unknown import explain
from distill.runs.check import check
from distill.runtime.errors import SettingError

# One a line: overrides, with " ;; " between several, of which the last is the bad one; after " -> " what the message
# has to name, where that is not all of the setting.
BAD = """
corpus=5
+recipe=distilgpt2_gutenberg ;; objective.pooled.weight=1 -> corpus.cross_documents=true, but objective.pooled
optimizer=null
student=null
teacher=null
train=null
train=5
evaluate=null
objective=null
schedule=null
backend=null
precision=null
tracker=null
scale=null
seed=null
seed=inf
resume=null
optimizer.betas=[0.9]
optimizer.betas=[0.9,0.98,0.999]
optimizer.betas=0.9
optimizer.betas=null
optimizer.eps=inf
optimizer.eps=0
optimizer.weight_decay=inf
optimizer.weight_decay=1e30
optimizer.lr=inf
optimizer.lr=1e30
optimizer.lr=null
backend=[1]
optimizer.lr=1e-300
optimizer.clip=1e-30
train.minutes=1e-9
corpus.sequence_length=1000000
optimizer.clip=1e400
optimizer.kind=adamm
optimizer=adam
optimizer.learning_rate=1
profile.stop_after=0
profile.stop_after=3
student.config={hidden_size:0}
student.config={hidden_size:-5}
student.config={num_attention_heads:0}
student.config={num_hidden_layers:0}
student.config={hiden_size:32}
student.config={hidden_size:foo}
student.config=null
student.config=5
student.config={vocab_size:0}
student.architecture=brt
student.dropout=1
student.dropout=nan
student.layers=5
student.layers=[]
student.layers=evry_second
student.init=layrs
student.init=null
student.path=
student=layers ;; student.path=my_student
student.init=random ;; student.architecture=bert ;; student.num_layers=2
student.init=random ;; student.architecture=bert ;; student.layers=even
student=pretrained ;; student.path=x ;; student.architecture=bert
student=pretrained ;; student.path=x ;; student.layers=[0]
teacher=bundled_small ;; teacher.path=x
teacher=bundled_small ;; teacher.revision=main
teacher=bundled_small ;; teacher.trust_remote_code=true
teacher=none ;; objective=mlm ;; teacher.micro_batches=2
teacher=none ;; objective=mlm ;; teacher.cache.top_k=8
teacher=several ;; +teacher.members.a={kind: bundled_deep, path: x} -> teacher.members.a.path
student=bert ;; student.layers=[0,1]
student.num_layers=0
student=layers ;; student.num_layers=0
student.tokenizer=/no/such
student.init=neighbors
student.init=fitted -> choose
student.init=config -> choose
student=layers ;; student.init=neighbours -> student.architecture
student.frozen=[head]
student.frozen=[1.5]
student.frozen=[-1]
student.frozen=null
backend.device=mps
backend.device=gpu
backend.device=cuda:-1
backend.timeout=inf
backend.timeout=0
backend.timeout=-1
backend.timeout=nan
backend.timeout=1e12
backend.threads=100000
backend.threads=0
backend.threads=-1
backend.processes=0
backend.processes=100000
backend.name=dpp
backend.rings=foo
backend.rings=0
backend.rings=100000
backend.sync=foo
backend.compression=fp8
backend.hosts=
backend.elastic=2:4
backend.elastic_wait=60
backend.collective=smddp
backend=ddp ;; backend.collective=a:b:c
backend=ddp ;; backend.collective=gloo ;; backend.rings=2 -> backend.rings
evaluate.sources.heldout=null
evaluate.sources=null
evaluate.sources=5
evaluate.sources.heldout=5
evaluate.sets=[heldout,heldout]
evaluate.sets=heldout
evaluate.sets=null
evaluate.sets=[wikitxt2]
evaluate.batch_size=1e9
evaluate.batch_size=1000000000
evaluate.measures=null
evaluate.measures=5
evaluate.max_sequences=1e99
evaluate.missing=foo
evaluate.stride=0
evaluate.every_steps=0
evaluate.pseudo_perplexity=null
evaluate.pseudo_perplexity.fraction=nan
evaluate.baseline=/no/such
evaluate.baseline=
objective.masking.mlm_probability=1
objective.masking.mlm_probability=inf
objective.masking.mlm_probability=nan
objective.masking.smoothing=inf
objective.masking.smoothing=1e9
objective.masking.ngrams=1000000
objective.masking.max_predictions=0
objective.masking=null
objective.soft=null
objective.soft.weight=inf
objective.soft.weight=1e30
objective.soft.weight=null
objective.soft.wieght=1
objective.sfot.weight=1 -> objective.sfot
objective.soft_classes.weight=1 -> head for class
objective=classes ;; objective.soft.weight=1 -> over the vocabulary
+objective.sfot.weight=1 -> objective.sfot
objective.temperature=1e9
objective.temperature=null
objective.temperature=1e-9
objective.kernel=fast
objective.task=mlmm
objective=distilbrt
corpus=gutenburg
corpus.path=
corpus.path=/no/such/folder
corpus.path=./no/such
corpus.sequence_length=1000000000
corpus.sequence_length=0
corpus.fraction=0
corpus.fraction=nan
corpus.fraction=inf
corpus.heldout=nan
corpus.max_sequences=-1
corpus.vocab_size=1000000000
data.workers=100000
data.cache=
data.cache=null
data.local=
corpus.field=
corpus.unlabelled=
corpus.kind=gutenburg
corpus.kind=null
corpus.invalid_files=foo
corpus.document=page
corpus=chat ;; corpus.template=
hydra.run.dir=
hydra.run.dir=null
train.steps=0
train.steps=inf
train.steps=1e5
train.steps=99999999999999999999
train.epochs=0
train.epochs=1000000000000
train.batch_size=0
train.batch_size=1000000000
train.accumulate=1000000000
train.minutes=inf
train.minutes=nan
train.minutes=1e30
train.keep=0
train.log_every=0
train.save_every=0
train.snapshots=[0]
train.snapshots=5
train.snapshots=[a]
train.workers=-1
train.workers=100000
train.max_nonfinite=0
train.stepz=5
trian.steps=5 -> trian
precision=fp17
precision.student=bf61
precision.compile=maybe
precision.kernels=pain
tracker=wandbb
tracker.mode=onlin
tracker.project=
schedule.warmup=2
schedule.warmup=nan
schedule.warmup=-1
schedule.warmup_steps=-1
schedule.floor=2
schedule.kind=linaer
schedule=linaer
scale=papr
+recipe=smokee
teacher=bundeld
teacher.kind=embeddedd
teacher.path=
teacher=pretrained ;; teacher.path=
teacher=pretrained ;; teacher.path=/no/such
teacher=pretrained ;; teacher.path=./no/such
teacher.micro_batches=0
teacher.micro_batches=1000000000
teacher.cache=null
teacher.cache.gigabytes=inf
teacher.cache.gigabytes=nan
teacher.cache.top_k=-1
teacher.cache.sampled=-1
teacher.cache.sampled=4 ;; teacher.cache.exponent=nan
teacher.cache.exponent=0.5
teacher.members=5
teacher.members=null
+teacher.members.a=5
+teacher.members.a=null
teacher=several ;; +teacher.members.a.weight=inf
teacher.revision=
seed=-1
seed=99999999999999999999999
seed=abc
resume=
resume=always
resume=/no/such
+given.a=1 -> given
~train
~train.steps
~corpus.path
train.steps=
train.steps=${oc.env:NOPE}
corpus.path=${corpus.pth}
train.steps=[1]
train={a:1} -> train.a
seed={a:1}
scale={a:1}
resume=[1]
corpus.pth=x
steps=5
evaluate.batchsize=5
train.steps=nan
""".strip().splitlines()


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """Hydra set up once for all: that takes longer than to compose."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def checked(overrides: list[str]) -> Config:
    """The settings of a command line as `python -m distill` reads and checks them, errors of Hydra in one line."""
    check_overrides(CommandLine.of(overrides))
    try:
        config = build(compose_overrides("config", overrides).settings, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise SettingError(explain(error)) from error
    check(config)
    return config


def test_the_table_is_long() -> None:
    assert len(BAD) == len(set(BAD)) and len(BAD) >= 150


@pytest.mark.parametrize("line", BAD)
def test_a_bad_value_is_refused_by_name(line: str) -> None:
    text, _, named = line.partition(" -> ")
    overrides = text.split(" ;; ")
    setting = named or overrides[-1].partition("=")[0].lstrip("+~")
    with pytest.raises(SettingError) as error:
        checked(overrides)
    message = str(error.value)
    assert setting in message and "\n" not in message and error.value.status == 2, message


NEAREST = {
    "train.stepz=5": "train.steps",
    "trian.steps=5": "did you mean train",
    "steps=5": "train.steps",
    "teacher=bundled_dep": "did you mean bundled_deep",
    "+recipe=smokee": "did you mean smoke",
    "optimizer.kind=adamm": "did you mean adamw",
    "student.architecture=brt": "did you mean bert",
    "student.config={hiden_size:32}": "did you mean hidden_size",
    "evaluate.sets=[wikitxt2]": "did you mean wikitext2",
    "precision.student=bf61": "did you mean bf16",
    "+objective.sfot.weight=1": "did you mean soft",
    "objective.soft.wieght=1": "did you mean weight",
    "objective.kernal=plain": "did you mean objective.kernel",
}


@pytest.mark.parametrize("override", NEAREST)
def test_the_nearest_name_is_suggested(override: str) -> None:
    with pytest.raises(SettingError, match="did you mean") as error:
        checked([override])
    assert NEAREST[override] in str(error.value)
