// Vercel's AI SDK with its default provider, which speaks Responses.
const { createOpenAI } = require("@ai-sdk/openai");
const { streamText } = require("ai");

const { stopWhen, tools } = require("./ai_tools.cjs");

const [baseURL, apiKey, name, prompt] = process.argv.slice(2);

const model = createOpenAI({ baseURL, apiKey })(name);

(async () => {
  const answer = streamText({ model, prompt, tools, stopWhen, onError: ({ error }) => { throw error; } });
  console.log(await answer.text);
})();
