"""A coding agent has a sub-agent find the line, loses its context, and edits the line from its summary.

A message `?b` asks a sub-agent for the line that begins with b. The sub-agent reads the file line by line and says `n`
for the next line or `y` for this one. After that the context of the main agent is full: it writes a summary, and goes
on in a new context, which has the task and the summary only. Any other message is the edit, `29` for the digit 9 in
line 2. The reward is 1 if the file is right in the end.

Each rollout is a session. The service records the calls and assembles one trajectory of up to three segments:
`subagent`, `compaction` (the first context with the summary) and `final`. All of them have the whole reward, and their
tokens share the weight of the rollout, so a group of G rollouts gives each of M trained tokens 1 / (G M). A rollout with
a call that failed is aborted: it has no part in the baseline, and another one takes its place.

Source: slime, examples/coding_agent_rl/generate.py and slime/agent/trajectory.py. There, a rollout that failed counts as
one with the reward 0, whose tokens are masked.

    python -m forebay.run examples/coding_agent.toml
"""

import logging

import forebay
import openai
import world

ROLLOUTS, ATTEMPTS, ASKS = 8, 3, 1

CONTEXT = 3
"""So many messages fill the context of the main agent."""

HELPER = {"x-claude-code-agent-id": "finder"}
"""A header by which the service knows the calls of sub-agents. It only decides how their segment is named."""


def find(run, llm, letter, lines):
    """The sub-agent. Returns the number of the line that it stopped at."""
    messages = [{"role": "user", "content": run.prompt("find", letter=letter, line=lines[0])}]
    for number, line in enumerate(lines, 1):
        if number > 1:
            messages.append({"role": "tool", "content": line, "tool_call_id": "next"})
        if run.chat(llm, "coder", messages) == world.RIGHT:
            return str(number)
    return world.NOTHING


def work(run, llm, q):
    """The main agent. Returns the file after its edit, and how often it asked the sub-agent."""
    helper = llm.with_options(default_headers=HELPER)
    messages, asked = [{"role": "user", "content": run.prompt("ask", q=q)}], 0
    while (said := run.chat(llm, "coder", messages)).startswith("?") and asked < ASKS:
        found = find(run, helper, said[1:], q.chunks)
        messages.append({"role": "tool", "content": found, "tool_call_id": "find"})
        asked += 1
        if len(messages) >= CONTEXT:
            messages.append({"role": "user", "content": run.prompt("compact")})
            summary = run.chat(llm, "coder", messages)
            messages = [{"role": "user", "content": run.prompt("resume", q=q, summary=summary)}]
    return world.edited(q.chunks, run.answer(said)), asked


def rollout(run, fb, llm, q, count):
    """One place of a group, played again if a call fails."""
    for _ in range(ATTEMPTS):
        try:
            with fb.session("coder", group_id=q.id, group_size=count) as s:
                file, asked = work(run, llm.with_options(base_url=s.base_url, api_key=s.key), q)
                s.reward = q.grade(file)
                s.reward_components = {"gold": s.reward, "asked": float(asked)}
            return s
        except openai.OpenAIError as error:
            logging.warning("a rollout of %s was aborted: %s", q.id, error)
    return None


def execute(run, fb, llm, q, count=ROLLOUTS):
    """All rollouts of a question."""
    return run.each(count, lambda n: rollout(run, fb, llm, q, count))


def main():
    run = forebay.run()
    fb, llm = forebay.Client(), run.openai()
    run.play(lambda q: execute(run, fb, llm, q))


if __name__ == "__main__":
    main()
