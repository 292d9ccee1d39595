//! The attacks of one tenant, each bounded in calls and time. No answer is an error: the service
//! may serve, refuse or drop a hostile call.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use anyhow::Result;
use codelia_proto::v1::{
    CheckPolicyRequest, CommandPolicy, EditFileRequest, FilesystemPolicy, ListRunsRequest, Policy,
    StartRunRequest, TextList, WatchRunResponse, policy_service_client::PolicyServiceClient,
};
use codelia_store::Scope;
use codelia_tests::{Client, Cluster, Http2, UnfinishedCall, shell};
use futures::{StreamExt, future::join_all, stream};
use tokio::{net::TcpStream, time::timeout};
use tonic::{Code, Status, Streaming};

const MIB: usize = 1024 * 1024;
/// How long an attack waits for the answer of one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the attack lasts at most.
const ATTACK_TIMEOUT: Duration = Duration::from_secs(40);

const BIG_RUNS: usize = 40;
const SILENT_CONNECTIONS: usize = 1000;
const WATCHES: usize = 300;
const WRONG_KEYS: usize = 1000;

/// The tenant that attacks, and how its calls were answered.
pub(super) struct Attacker {
    client: Client,
    address: String,
    session: String,
    /// Another key, since calls of one key are limited together.
    second_key: String,
    /// The number of calls by attack and answer.
    answers: Mutex<BTreeMap<(&'static str, String), usize>>,
}

impl Attacker {
    /// Prepares a session with files to edit.
    pub(super) async fn new(cluster: &Cluster) -> Result<Self> {
        let client = cluster.tenant("attacker").await?;
        let session = client.session().await?.name;
        client.put(&session, "short", &"a".repeat(1000)).await?;
        client.put(&session, "long", &"a".repeat(4 * MIB)).await?;
        let address = cluster.apis[0].address.clone();
        let second_key = cluster.key("attacker", &[Scope::Run]).await?;
        Ok(Self { client, address, session, second_key, answers: Mutex::default() })
    }

    /// Makes all attacks at the same time. Returns when the last call is answered or time is up.
    pub(super) async fn attack(&self) -> Result<()> {
        let silent =
            join_all((0..SILENT_CONNECTIONS).map(|_| TcpStream::connect(&self.address))).await;
        for connection in &silent {
            self.record(
                "connect",
                connection.as_ref().map(drop).map_err(|error| error.kind().to_string()),
            );
        }
        let run = self.client.start(shell(&self.session, "exec sleep 100")).await?;
        let all = async {
            tokio::join!(
                self.policies(),
                self.edits(),
                self.listings(),
                self.wrong_keys(),
                self.watches(&run.name),
                self.unfinished_messages(),
            )
        };
        // What an attack holds is dropped when the last one ends.
        match timeout(ATTACK_TIMEOUT, all).await {
            Ok((.., held)) => held.map(drop),
            Err(_) => Ok(()),
        }
    }

    /// One line for each attack and answer.
    pub(super) fn report(&self) -> String {
        let answers = self.answers.lock().expect("no attack panics");
        answers
            .iter()
            .map(|((attack, answer), count)| format!("{attack}: {count} x {answer}\n"))
            .collect()
    }

    fn record(&self, attack: &'static str, answer: Result<(), String>) {
        let answer = answer.err().unwrap_or_else(|| "ok".to_owned());
        *self.answers.lock().expect("no attack panics").entry((attack, answer)).or_default() += 1;
    }

    /// Makes `count` calls, at most `width` at a time.
    async fn repeat<F>(
        &self,
        attack: &'static str,
        count: usize,
        width: usize,
        call: impl Fn(usize) -> F,
    ) where
        F: Future<Output = Result<(), Status>>,
    {
        let calls = stream::iter(0..count).map(|number| timeout(CALL_TIMEOUT, call(number)));
        calls
            .buffer_unordered(width)
            .for_each(async |answer| {
                let answer =
                    answer.unwrap_or_else(|_| Err(Status::new(Code::DeadlineExceeded, "")));
                self.record(attack, answer.map_err(|status| format!("{:?}", status.code())));
            })
            .await;
    }

    /// Policies that are expensive to compare, to resolve and to compile.
    async fn policies(&self) {
        let long = deep_policy();
        let check = async |_| {
            let request = CheckPolicyRequest { policy: Some(long.clone()), mode: 0 };
            PolicyServiceClient::new(self.client.authorized()).check_policy(request).await.map(drop)
        };
        let start = async |policy: Policy| {
            let request = StartRunRequest { policy: Some(policy), ..shell(&self.session, "true") };
            self.client.start(request).await.map(drop)
        };
        tokio::join!(
            self.repeat("check policy", 6, 3, check),
            self.repeat("start with long paths", 3, 1, |_| start(long.clone())),
            self.repeat("start with denied paths", 6, 3, |_| start(denied_policy())),
            self.repeat("start with patterns", 6, 3, |_| start(pattern_policy())),
        );
    }

    /// Edits whose result or search is large.
    async fn edits(&self) {
        let edit = async |path: &str, old_text: Vec<u8>, new_text: Vec<u8>| {
            let (parent, path) = (self.session.clone(), path.to_owned());
            let request = EditFileRequest {
                parent,
                path,
                old_text,
                new_text,
                replace_all: true,
                ..Default::default()
            };
            self.client.files().edit_file(request).await.map(drop)
        };
        let needle = || [vec![b'a'; MIB - 1], vec![b'b']].concat();
        tokio::join!(
            self.repeat("edit that grows", 4, 2, |_| edit("short", b"a".to_vec(), vec![b'b'; MIB])),
            self.repeat("edit that searches", 4, 2, |_| edit("long", needle(), Vec::new())),
        );
    }

    /// Lists of runs with large commands.
    async fn listings(&self) {
        let start = async |_| {
            let mut request = shell(&self.session, "true");
            let env = (0..8).map(|number| (format!("V{number}"), "x".repeat(120_000))).collect();
            request.command.as_mut().expect("a command").env = env;
            self.client.start(request).await.map(drop)
        };
        self.repeat("start with environment", BIG_RUNS, 4, start).await;
        let list = async |_| {
            let request = ListRunsRequest {
                parent: "sessions/-".into(),
                page_size: 1000,
                ..Default::default()
            };
            self.client.runs().list_runs(request).await.map(drop)
        };
        self.repeat("list runs", 12, 4, list).await;
    }

    async fn wrong_keys(&self) {
        let guess = async |number: usize| {
            let client =
                self.client.with_secret(&format!("cdl_{number:043}")).expect("a valid header");
            client.session().await.map(drop)
        };
        self.repeat("wrong key", WRONG_KEYS, 8, guess).await;
    }

    /// Holds streams on one run.
    async fn watches(&self, run: &str) -> Vec<Result<Streaming<WatchRunResponse>, Status>> {
        let watches = join_all((0..WATCHES).map(|_| self.client.watch(run, 0))).await;
        for watch in &watches {
            self.record(
                "watch",
                watch.as_ref().map(drop).map_err(|status| format!("{:?}", status.code())),
            );
        }
        watches
    }

    /// Holds calls whose message lacks its last byte.
    async fn unfinished_messages(&self) -> Result<Vec<(Http2, Vec<UnfinishedCall>)>> {
        let key = Some(self.second_key.as_str());
        let reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
        let targets = [
            ("unfinished run", "/codelia.v1.RunService/StartRun", key, 40),
            ("unfinished health", "/grpc.health.v1.Health/Check", None, 100),
            ("unfinished reflection", reflection, None, 100),
            ("unfinished run without key", "/codelia.v1.RunService/StartRun", None, 100),
        ];
        let mut connections = Vec::new();
        for (attack, path, secret, streams) in targets {
            let connection = Http2::connect("127.0.0.1", &self.address).await?;
            let mut held = Vec::new();
            for _ in 0..streams {
                let (announced, bytes) = (u32::try_from(4 * MIB)?, 4 * MIB - 1);
                let call = connection.unfinished(path, secret, announced, bytes);
                let answer = match timeout(CALL_TIMEOUT, call).await {
                    Ok(Ok(call)) if call.sent == bytes => {
                        held.push(call);
                        Ok(())
                    }
                    Ok(Ok(_)) => Err("refused".to_owned()),
                    Ok(Err(error)) => Err(error.to_string()),
                    Err(_) => Err("not read".to_owned()),
                };
                self.record(attack, answer);
            }
            connections.push((connection, held));
        }
        Ok(connections)
    }
}

/// Paths with a long common prefix: expensive to compare pairwise.
fn deep_policy() -> Policy {
    let path = |number: usize| format!("/usr{}/{number}", "/a".repeat(1980));
    let filesystem = FilesystemPolicy {
        read_only_paths: Some(TextList { values: (0..500).map(path).collect() }),
        denied_paths: (500..1000).map(path).collect(),
        ..FilesystemPolicy::default()
    };
    Policy { filesystem: Some(filesystem), ..Policy::default() }
}

/// Paths that are hidden one by one.
fn denied_policy() -> Policy {
    let denied_paths = (0..500).map(|number| format!("/usr/share/{number}")).collect();
    let filesystem = FilesystemPolicy { denied_paths, ..FilesystemPolicy::default() };
    Policy { filesystem: Some(filesystem), ..Policy::default() }
}

/// Patterns that are expensive to compile.
fn pattern_policy() -> Policy {
    let blocked_patterns = (0..100).map(|number| format!(r"[\w\s]{{1,20}}{number}$")).collect();
    Policy {
        command: Some(CommandPolicy { blocked_patterns, ..CommandPolicy::default() }),
        ..Policy::default()
    }
}
