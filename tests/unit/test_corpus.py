"""The text of the demo and the batches drawn from it."""

import pytest
import torch

from imbrex.demo import load_corpus
from imbrex.launch.factors import factorise


def test_the_standard_library_is_split_by_file_and_always_the_same():
    corpus, again = load_corpus(length=64), load_corpus(length=64)
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.held_out, again.held_out)
    assert corpus.num_files > 200
    assert 0.03 < len(corpus.held_out) / len(corpus.train) < 0.3
    assert b"import" in bytes(corpus.held_out.tolist()[:100_000])


def test_the_reference_losses_of_source_code():
    references = load_corpus(length=64).reference_losses()
    assert references["unigram"] == pytest.approx(3.15, abs=0.1)
    assert references["bigram"] == pytest.approx(2.42, abs=0.1)


def test_a_batch_depends_on_seed_and_step_only():
    corpus = load_corpus(length=16)
    batch = corpus.batch(3, seed=1, batch=8, length=16)
    assert batch.shape == (8, 17)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, corpus.batch(3, seed=1, batch=8, length=16))
    assert not torch.equal(batch, corpus.batch(4, seed=1, batch=8, length=16))
    assert not torch.equal(batch, corpus.batch(3, seed=2, batch=8, length=16))


def test_several_files_are_never_in_both_parts(tmp_path):
    for i in range(11):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * 100)
    corpus = load_corpus(sorted(tmp_path.iterdir()), length=10)
    train, held_out = set(corpus.train.tolist()), set(corpus.held_out.tolist())
    assert (len(train), len(held_out)) == (9, 2)
    assert not train & held_out


def test_of_one_file_the_last_tenth_is_held_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(200)))
    corpus = load_corpus([path], length=10)
    assert corpus.train.tolist() == list(range(180))
    assert corpus.held_out.tolist() == list(range(180, 200))
    assert corpus.held_out_batches(2, batch=3, length=10)[-1, -1].tolist() == list(range(189, 200))


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read the data file"), (b"", "is empty"), (b"short", "a sequence takes 65")],
)
def test_files_that_cannot_be_used_say_so(tmp_path, content, words):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load_corpus([path], length=64)


def test_parts_of_a_batch_cover_it_once():
    for ranks, ep, tp, same in [(1, 1, 1, False), (3, 3, 1, False), (4, 2, 2, False), (8, 2, 2, True)]:
        factors = factorise(ranks, expert=ep, tensor=tp, same_tokens=same)
        parts = [factors.slice(rank, 16) for rank in range(ranks)]
        covered = [i for part in sorted({(p.start, p.stop) for p in parts}) for i in range(*part)]
        assert covered == list(range(16))
        assert (
            len({(p.start, p.stop) for p in parts}) == factors.token_ranks == (ranks // 4 if same else ranks)
        )


@pytest.mark.parametrize("factors", [(3, 2, 1), (4, 3, 1), (2, 1, 4), (0, None, 1), (4, 0, 1), (4, 2, 0)])
def test_factors_that_do_not_divide_are_refused(factors):
    ranks, expert, tensor = factors
    with pytest.raises(ValueError, match="--"):
        factorise(ranks, expert=expert, tensor=tensor)
