// Vercel's AI SDK with chat completions.
const { createOpenAI } = require("@ai-sdk/openai");
const { generateText } = require("ai");

const { stopWhen, tools } = require("./ai_tools.cjs");

const [baseURL, apiKey, name, prompt] = process.argv.slice(2);

const model = createOpenAI({ baseURL, apiKey }).chat(name);

generateText({ model, prompt, tools, stopWhen }).then(({ text }) => console.log(text));
