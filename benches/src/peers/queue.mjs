// A job queue in Postgres without isolation: each job starts `true`. Callers add a job, wait until it
// is done, and add the next one. Prints the time of each job in microseconds.
//
//   node queue.mjs MODULES DATABASE_URL CALLERS SECONDS

import { spawn } from "node:child_process";
import { createRequire } from "node:module";

const [modules, database, callers, seconds] = process.argv.slice(2);
const { Logger, run } = createRequire(modules + "/")("graphile-worker");
// This client takes `prefer` for `require`.
const connectionString = database.replace("sslmode=prefer", "sslmode=disable");

const waiting = new Map();
const start = () =>
  new Promise((resolve, reject) => {
    const child = spawn("/bin/true", { stdio: "ignore" });
    child.on("error", reject);
    child.on("exit", (code) => (code === 0 ? resolve() : reject(new Error(`exit ${code}`))));
  });
const runner = await run({
  connectionString,
  concurrency: Number(callers),
  maxPoolSize: Number(callers) + 2,
  noHandleSignals: true,
  logger: new Logger(() => () => {}),
  taskList: { true: start },
});
runner.events.on("job:success", ({ job }) => waiting.get(job.payload.number)?.resolve());
runner.events.on("job:error", ({ job, error }) => waiting.get(job.payload.number)?.reject(error));

let number = 0;
async function once() {
  const mine = number++;
  const begin = process.hrtime.bigint();
  const done = new Promise((resolve, reject) => waiting.set(mine, { resolve, reject }));
  await runner.addJob("true", { number: mine });
  await done;
  waiting.delete(mine);
  return Number(process.hrtime.bigint() - begin) / 1000;
}

async function caller(until, times) {
  while (Date.now() < until) times.push(await once());
}

await once();
const times = [];
const until = Date.now() + Number(seconds) * 1000;
await Promise.all(Array.from({ length: Number(callers) }, () => caller(until, times)));
await runner.stop();
console.log(times.map((time) => Math.round(time)).join("\n"));
