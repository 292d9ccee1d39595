//! The images of mode `container` are built from `deploy/docker`, and runs use them by their
//! profile.

use std::{env, path::Path, process::Command};

use anyhow::{Result, ensure};
use codelia_proto::v1::{
    ContainerPolicy, CreateSessionRequest, Policy, SandboxMode, StartRunRequest, outcome::Kind,
};
use codelia_tests::{Cluster, ClusterOptions, ENGINE_SOCKET, available, engine_command, shell};

/// The profiles with a program of each. Only the quickest is built unless `CODELIA_TEST_IMAGES`
/// names others.
const PROGRAMS: [(&str, &str); 4] = [
    ("base", "git --version && npm --version"),
    (
        "node",
        "echo 'const n: number = 6; console.log(n * 7)' > a.ts && tsc a.ts && node a.js | grep 42",
    ),
    (
        "python",
        "echo 'def test_it(): assert 6 * 7 == 42' > test_a.py && python3 -m pytest -q test_a.py",
    ),
    ("rust", "cargo init -q --vcs none --name answer . && cargo run -q --offline | grep Hello"),
];

/// Removes the images at the end.
struct Images(String);

impl Images {
    /// Builds images from the engine's `codelia-base` in place of one from a registry.
    fn build(profiles: &[&str]) -> Result<Self> {
        let images = Self(format!("codelia-test-{}", uuid::Uuid::new_v4().simple()));
        engine_command(&["tag", "codelia-base", &images.name("base")])?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/sandbox-images");
        let host = format!("unix://{}", env::var(ENGINE_SOCKET)?);
        let environment =
            [("DOCKER_HOST", host.as_str()), ("PREFIX", &images.0), ("BASE", "codelia-base")];
        let done = Command::new(script).args(profiles).envs(environment).output()?;
        ensure!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&[done.stdout, done.stderr].concat())
        );
        Ok(images)
    }

    fn name(&self, profile: &str) -> String {
        format!("{}-{profile}", self.0)
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        for (profile, _) in PROGRAMS {
            // Those that were not built do not exist.
            let _ = engine_command(&["rmi", &self.name(profile)]);
        }
    }
}

#[tokio::test]
async fn profile_image_runs_its_programs() -> Result<()> {
    let missing = env::var_os(ENGINE_SOCKET).is_none().then_some("no engine: use with-engine");
    if !available("container", missing) {
        return Ok(());
    }
    let wanted = env::var("CODELIA_TEST_IMAGES").unwrap_or_else(|_| "python".to_owned());
    let profiles: Vec<&str> = wanted.split(',').collect();
    let images = Images::build(&profiles)?;
    let mapped: Vec<_> =
        profiles.iter().map(|name| format!("{name}={}", images.name(name))).collect();
    let settings = vec![
        ("CODELIA_SANDBOX_CONTAINER_SOCKET", env::var(ENGINE_SOCKET)?),
        ("CODELIA_SANDBOX_CONTAINER_IMAGES", mapped.join(",")),
    ];
    let cluster =
        Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let run = async |profile: Option<&str>, program: &str| -> Result<bool> {
        let session = client.create(CreateSessionRequest::default()).await?.name;
        let container = profile.map(|name| ContainerPolicy { profile: Some(name.to_owned()) });
        let policy = Some(Policy { container, ..Policy::default() });
        let mode = SandboxMode::Container.into();
        let run =
            client.start(StartRunRequest { mode, policy, ..shell(&session, program) }).await?;
        Ok(client.watch_to_end(&run.name, 0).await?.outcome() == Kind::Exited(0))
    };
    for (profile, program) in PROGRAMS.iter().filter(|(name, _)| profiles.contains(name)) {
        ensure!(run(Some(profile), program).await?, "{profile}");
        let is_in_base = run(None, program).await?;
        ensure!(
            *profile == "base" || !is_in_base,
            "the control: the image of {profile} adds nothing"
        );
    }
    cluster.end().await
}
