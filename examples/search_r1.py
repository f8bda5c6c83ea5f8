"""An agent searches for what it does not know, and answers.

A message that begins with `?` is a search, whose document comes back as a message of the tool. Any other message is
the answer, and the reward is 1 if it is right. After two searches the next message is the answer. A search that is
not understood gets a hint instead of a document. What the tool says is context: its tokens are not trained.

Source: slime, examples/search-r1/generate_with_search.py and qa_em_format.py. There, tags mark searches and answers.
It has a parameter `format_score` that it never uses, so a wrong answer is worth 0 there and here.

    python -m forebay.run examples/search_r1.toml
"""

import forebay
import world

ROLLOUTS, SEARCHES = 16, 2


def play(run, llm, rollout, q):
    """One rollout: searches and an answer."""
    messages = [{"role": "user", "content": run.prompt("ask", q=q)}]
    searches = 0
    while (said := run.talk(rollout, llm, messages)) is not None:
        if not said.startswith("?") or searches == SEARCHES:
            break
        messages.append({"role": "tool", "content": world.search(said[1:]), "tool_call_id": "search"})
        searches += 1
    if said is None:
        return
    rollout.reward = q.grade(run.answer(said))
    rollout.reward_components = {"gold": rollout.reward, "searches": float(searches)}


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a question, posted as one bundle."""
    with fb.bundle() as b:
        rollouts = [b.rollout("searcher", group_id=q.id, group_size=count) for _ in range(count)]
        run.each(count, lambda n: play(run, llm, rollouts[n], q))
    return b


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
