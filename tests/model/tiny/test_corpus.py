"""The generator of the built-in corpus: same seed same text, disjoint splits, checkers that can say no."""

import random

import pytest

from parity.model.tiny import corpus

OPEN = [kind for kind in corpus.TASK_KINDS if kind not in corpus.ONE_RIGHT_ANSWER]


def some(kind: str, n: int = 40, split: corpus.Split = "train") -> list[corpus.CorpusTask]:
    rng = random.Random(f"test {kind}")
    return [corpus.task(rng, split, [kind]) for _ in range(n)]


def test_the_same_seed_gives_the_same_text() -> None:
    assert corpus.conversation(7) == corpus.conversation(7)
    assert corpus.conversation(7) != corpus.conversation(8)
    assert corpus.conversation(7, "train") != corpus.conversation(7, "held_out")
    assert corpus.prompts(5, seed=1) == corpus.prompts(5, seed=1) != corpus.prompts(5, seed=2)
    questions = [[task.question for task in corpus.held_out_tasks(20, seed)] for seed in (3, 3, 4)]
    assert questions[0] == questions[1] != questions[2]


def test_the_text_of_a_seed_is_frozen() -> None:
    """The shipped models were trained on this text: who changes it retrains them."""
    assert corpus.conversation(1)[:2] == [
        {"role": "user", "content": "repeat oqqp 2 times"},
        {"role": "assistant", "content": "oqqpoqqp"},
    ]
    assert corpus.split_of("add 47+85") == "train"


def test_the_splits_are_disjoint_and_one_in_ten_is_held_out() -> None:
    rng = random.Random(0)
    drawn = [maker(rng).question for maker, _ in corpus.TASK_KINDS.values() for _ in range(300)]
    share = sum(corpus.split_of(question) == "held_out" for question in drawn) / len(drawn)
    assert 0.07 < share < 0.13
    for split in ("train", "held_out"):
        chats = [corpus.conversation(seed, split) for seed in range(50)]
        users = {m["content"] for chat in chats for m in chat if m["role"] == "user"}
        assert {corpus.split_of(question) for question in users} == {split}
    assert all(corpus.split_of(task.question) == "held_out" for task in corpus.held_out_tasks(50))


@pytest.mark.parametrize("kind", corpus.TASK_KINDS)
def test_a_checker_takes_the_generators_own_answers(kind: str) -> None:
    for task in some(kind):
        assert task.kind == kind
        assert task.check(task.answer)
        assert task.check(f"{task.answer}<|im_end|>")
        assert task.check(f"{task.work}</think>{task.final}")
        assert task.one_right_answer == (kind in corpus.ONE_RIGHT_ANSWER)


@pytest.mark.parametrize("kind", corpus.TASK_KINDS)
def test_a_checker_refuses_corrupted_answers(kind: str) -> None:
    for task in some(kind):
        assert not task.check("")
        assert not task.check(task.answer[:-1])
        assert not task.check(task.answer + task.answer[-1])
        assert not task.check("?" + task.answer[1:])
        assert not task.check(f"{task.work}</think>{task.final}x")


def other_answers(task: corpus.CorpusTask) -> set[str]:
    """Answers to the same question that the generator could have given instead."""
    final, words = task.final, task.question.split(" ")
    if task.kind == "walk":  # every step the other way
        return {"".join(str((2 * int(words[3]) - int(digit)) % 10) for digit in final)}
    if task.kind == "song":  # always the usual note, always the unusual one
        texts = []
        for table in corpus.CORPUS_KEYS[words[0]]:
            here, text = words[3], ""
            for _ in final:
                here = table[corpus.NOTES.index(here)]
                text += here
            texts.append(text)
        return set(texts)
    if task.kind == "pick":
        return {final[::-1], "".join(sorted(final))}
    if task.kind == "split":
        return {" ".join(pair[::-1] for pair in final.split(" "))}
    big, small = max(words[1:]), min(words[1:])
    return {f"{big} beats {small}", f"{small} is under {big}", f"{big} is over {small}"}


@pytest.mark.parametrize("kind", OPEN)
def test_an_open_question_has_several_right_answers(kind: str) -> None:
    for task in some(kind):
        assert all(task.check(answer) for answer in other_answers(task))
    assert any(other_answers(task) - {task.final} for task in some(kind))


def test_a_task_rejects_what_a_rule_forbids() -> None:
    walk = next(task for task in some("walk") if task.question.startswith("sun"))
    first, second = int(walk.final[0]), int(walk.final[1])
    assert not walk.check(walk.final[0] + str((first + 5) % 10) + walk.final[2:]), "a step of five"
    assert abs(first - second) in (1, 9)
    pick = some("pick")[0]
    assert not pick.check(pick.final[:-1] + pick.final[0]), "a letter twice"
    split = some("split")[0]
    assert not split.check(f"{(int(split.final[0]) + 1) % 10}{split.final[1:]}"), "a wrong sum"
    compare = some("compare")[0]
    big, small = max(compare.question.split(" ")[1:]), min(compare.question.split(" ")[1:])
    assert not compare.check(f"{small} beats {big}")


def test_worked_answers_show_the_work_and_thinking_moves_it() -> None:
    add = some("add")[0]
    assert add.answer == f"{add.work} so {add.final}"
    plain, thought = (corpus.messages_of(add, thinking=thinking)[1] for thinking in (False, True))
    assert plain == {"role": "assistant", "content": add.answer}
    assert thought == {"role": "assistant", "reasoning_content": add.work, "content": add.final}


@pytest.mark.parametrize("tokens", [80, 192, 400])
def test_a_conversation_fits_and_has_several_turns(tokens: int) -> None:
    chats = [corpus.conversation(seed, tokens=tokens) for seed in range(60)]
    assert max(map(corpus.token_count, chats)) <= tokens
    assert max(map(corpus.token_count, chats)) > 0.9 * tokens
    if tokens == 192:
        assert sum(sum(m["role"] == "user" for m in chat) for chat in chats) / len(chats) > 2.5


def test_kinds_can_be_limited() -> None:
    chats = [corpus.conversation(seed, kinds=("sort", "repeat")) for seed in range(20)]
    users = [m["content"] for chat in chats for m in chat if m["role"] == "user"]
    assert {user.split(" ")[0] for user in users} == {"sort", "repeat"}


def test_too_short_a_conversation_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 80 tokens, 79 were allowed"):
        corpus.conversation(0, tokens=79)


def test_shares_of_thinking_and_of_system_messages() -> None:
    chats = [corpus.conversation(seed) for seed in range(400)]
    turns = [m for chat in chats for m in chat if m["role"] == "assistant"]
    thinking = sum("reasoning_content" in m for m in turns) / len(turns)
    assert abs(thinking - corpus.THINKING_SHARE) < 0.04
    assert abs(sum(chat[0]["role"] == "system" for chat in chats) / len(chats) - corpus.SYSTEM_SHARE) < 0.06


def test_prompts_end_with_a_user_and_some_have_an_earlier_turn() -> None:
    chats = corpus.prompts(6)
    assert [len(chat) for chat in chats] == [1, 3, 1, 3, 1, 3]
    assert all(chat[-1]["role"] == "user" for chat in chats)


def test_held_out_tasks_go_through_the_kinds_in_turn() -> None:
    tasks = corpus.held_out_tasks(18)
    assert [task.kind for task in tasks] == list(corpus.ONE_RIGHT_ANSWER) * 2
    assert len({task.question for task in tasks}) == 18
    assert {task.kind for task in corpus.held_out_tasks(14, one_right_answer=False)} == set(corpus.TASK_KINDS)


def test_more_tasks_than_a_small_kind_has_questions() -> None:
    tasks = corpus.held_out_tasks(420, one_right_answer=False)
    assert len({task.question for task in tasks}) == 420
    assert sum(task.kind == "split" for task in tasks) < 420 // len(corpus.TASK_KINDS)


def test_openings_are_a_fair_sample_of_held_out_conversations() -> None:
    made = corpus.openings(600)
    assert made[:5] == corpus.openings(5) != corpus.openings(5, seed=1)
    assert all(each.messages[-1]["role"] == "user" for each in made)
    asked = [m["content"] for each in made for m in each.messages if m["role"] == "user"]
    assert {corpus.split_of(question) for question in asked} == {"held_out"}
    assert len({str(each.messages) for each in made}) > 590, "different conversations"
    share = sum(each.thinking for each in made) / len(made)
    assert abs(share - corpus.THINKING_SHARE) < 0.05
    share = sum(each.messages[0]["role"] == "system" for each in made) / len(made)
    assert abs(share - corpus.SYSTEM_SHARE) < 0.05


def kind_of(question: str) -> str:
    """The kind of a question, by its words alone."""
    words = question.split(" ")
    if ": get " in question:
        return "lookup"
    if words[0] == "from":
        return "step"
    if words[-2] == "from":
        return "chain"
    return words[1] if words[1] in ("walk", "song") else words[0]


def test_openings_ask_what_conversations_ask() -> None:
    """Kinds and turns in the shares that whole conversations have, counted over other conversations."""
    last = [each.messages[-1]["content"] for each in corpus.openings(1500)]
    whole = [corpus.conversation(seed, "held_out") for seed in range(800)]
    every = [[m["content"] for m in chat if m["role"] == "user"] for chat in whole]
    # A conversation counts once whatever its length, as in `openings`, so each of its turns weighs less.
    for kind in corpus.TASK_KINDS:
        wanted = sum(sum(kind_of(q) == kind for q in turns) / len(turns) for turns in every) / len(every)
        found = sum(kind_of(question) == kind for question in last) / len(last)
        assert abs(found - wanted) < 0.035, (kind, found, wanted)
    wanted = sum(1 / len(turns) for turns in every) / len(every)
    first = [each for each in corpus.openings(1500) if sum(m["role"] == "user" for m in each.messages) == 1]
    assert abs(len(first) / 1500 - wanted) < 0.04
