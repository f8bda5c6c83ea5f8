// Vercel's AI SDK with its provider for Anthropic's Messages. Its base URL ends with /v1.
const { createAnthropic } = require("@ai-sdk/anthropic");
const { generateText } = require("ai");

const { stopWhen, tools } = require("./ai_tools.cjs");

const [baseURL, apiKey, name, prompt] = process.argv.slice(2);

const model = createAnthropic({ baseURL, apiKey })(name);

generateText({ model, prompt, tools, stopWhen }).then(({ text }) => console.log(text));
