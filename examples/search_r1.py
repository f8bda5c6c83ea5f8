"""An agent searches for what it does not know, and answers.

A message that begins with `?` is a search, whose document comes back as a message of the tool. Any other message is
the answer, and the reward is 1 if it is right. After two searches the next message is the answer. A search that is
not understood gets a hint instead of a document.

Each rollout is a session: the agent has an address and a key, and the service records its calls. Each call continues the
one before, so they become one segment. What the tool says is context: its tokens are not trained.

Source: slime, examples/search-r1/generate_with_search.py and qa_em_format.py. There, tags mark searches and answers.
It has a parameter `format_score` that it never uses, so a wrong answer is worth 0 there and here.

    python -m forebay.run examples/search_r1.toml
"""

import forebay
import world

ROLLOUTS, SEARCHES = 16, 2


def answer(run, llm, q):
    """Searches, and answers. Returns the answer, and the number of searches."""
    messages, searches = [{"role": "user", "content": run.prompt("ask", q=q)}], 0
    while (said := run.chat(llm, "searcher", messages)).startswith("?") and searches < SEARCHES:
        messages.append({"role": "tool", "content": world.search(said[1:]), "tool_call_id": "search"})
        searches += 1
    return run.answer(said), searches


def play(run, fb, llm, q, count):
    """One rollout, in a session. If a call fails, the session is aborted."""
    with fb.session("searcher", group_id=q.id, group_size=count) as s:
        said, searches = answer(run, llm.with_options(base_url=s.base_url, api_key=s.key), q)
        s.reward = q.grade(said)
        s.reward_components = {"gold": s.reward, "searches": float(searches)}
    return s


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a question, each of which is stored when it ends."""
    return run.each(count, lambda n: play(run, fb, llm, q, count))


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
