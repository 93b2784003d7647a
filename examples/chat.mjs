// A chat with the OpenAI SDK for Node (`npm install openai`), Node 22 or newer.

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: `${process.env.SERVELITE_URL ?? "http://127.0.0.1:8000"}/v1`,
  apiKey: process.env.SERVELITE_KEY ?? "none", // one of the server's --api-key, if it has any
});

const answer = await client.chat.completions.create({
  model: "demo",
  messages: [{ role: "user", content: "What is the capital of France?" }],
  temperature: 0,
});
console.log(answer.choices[0].message.content);
console.log(`${answer.usage.prompt_tokens} tokens in, ${answer.usage.completion_tokens} out`);
