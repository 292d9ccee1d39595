// Creates a session, runs the command in it and shows the output while it arrives.
"use strict";

const form = document.getElementById("form");
const state = document.getElementById("status");
const output = document.getElementById("output");

function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

async function runCommand(endpoint, key, command) {
  const codelia = new Codelia(endpoint, key);
  const { session } = await codelia.call("SessionService/CreateSession", {});
  const argv = ["sh", "-c", command];
  const { run } = await codelia.call("RunService/StartRun", { parent: session.name, command: { argv } });
  output.dataset.session = session.name;
  const decoder = new TextDecoder();
  for await (const { event } of codelia.stream("RunService/WatchRun", { name: run.name })) {
    if (event.output) output.textContent += decoder.decode(bytes(event.output.data), { stream: true });
    if (event.finished) state.textContent = `ended: ${JSON.stringify(event.finished.run.outcome)}`;
  }
  await codelia.call("SessionService/CloseSession", { name: session.name });
}

form.addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  output.textContent = "";
  state.textContent = "running";
  const { endpoint, key, command } = Object.fromEntries(new FormData(form));
  try {
    await runCommand(endpoint, key, command);
  } catch (error) {
    state.textContent = `failed: ${error.message}`;
  }
});
