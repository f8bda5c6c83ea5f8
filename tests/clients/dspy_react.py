"""DSPy's ReAct, which asks for named fields as text and sends its whole history in one message of the user."""
import dspy

import tools

base_url, key, model, task = tools.arguments()

llm = dspy.LM(f"openai/{model}", api_base=base_url, api_key=key)

dspy.configure(lm=llm)
dspy.ReAct("question -> answer", tools=[tools.write_file, tools.run])(question=task)
