// The openai package for Node against a running stack: URL and key by environment, one JSON line out.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.ZOO_URL, apiKey: process.env.ZOO_KEY, maxRetries: 0 });
const asked = { model: "echo", messages: [{ role: "user", content: "hi" }], max_tokens: 8 };

const whole = await client.chat.completions.create(asked);

const parts = [];
let usage = null;
let streamId = "";
const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamId = chunk.id;
  parts.push(chunk.choices[0]?.delta.content ?? "");
  usage = chunk.usage ?? usage;
}

const runner = client.chat.completions.stream(asked);
const final = await runner.finalChatCompletion();

let refused = null;
try {
  await client.chat.completions.create({ ...asked, n: 0 });
} catch (error) {
  refused = { name: error.constructor.name, status: error.status, param: error.param, code: error.code };
}

const models = [];
for await (const model of client.models.list()) models.push(model.id);

console.log(
  JSON.stringify({
    whole: { id: whole.id, text: whole.choices[0].message.content, usage: whole.usage },
    stream: { id: streamId, text: parts.join(""), usage },
    final: { id: final.id, text: final.choices[0].message.content, reason: final.choices[0].finish_reason },
    refused,
    models,
  }),
);
