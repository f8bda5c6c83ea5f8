// The two tools for Vercel's AI SDK, and its loop.
const { execSync } = require("node:child_process");
const { writeFileSync } = require("node:fs");
const { jsonSchema, stepCountIs, tool } = require("ai");

const schema = (...names) =>
  jsonSchema({
    type: "object",
    properties: Object.fromEntries(names.map((name) => [name, { type: "string" }])),
    required: names,
  });

exports.tools = {
  write_file: tool({
    description: "Writes a file.",
    inputSchema: schema("path", "text"),
    execute: ({ path, text }) => {
      writeFileSync(path, text);
      return `${path} is written`;
    },
  }),
  run: tool({
    description: "Runs a command and returns its output.",
    inputSchema: schema("command"),
    execute: ({ command }) => execSync(`${command} 2>&1`, { encoding: "utf8" }),
  }),
};
exports.stopWhen = stepCountIs(5);
