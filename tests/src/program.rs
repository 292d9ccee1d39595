//! The built programs under test.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// Paths of `codelia` and `codelia-init`.
#[derive(Debug, Clone)]
pub struct Program {
    codelia: PathBuf,
    init: Option<PathBuf>,
}

impl Program {
    /// Finds the programs in the target directory of this test.
    pub fn find() -> Result<Self> {
        let exe = std::env::current_exe().context("find the path of the test binary")?;
        // target/{profile}/codelia-benches or target/{profile}/deps/e2e-…
        let found = exe
            .ancestors()
            .skip(1)
            .take(2)
            .map(|dir| dir.join("codelia"))
            .find(|path| path.is_file());
        let Some(codelia) = found else {
            bail!(
                "no `codelia` near {}: run `make test` or `cargo build --workspace --bins`",
                exe.display()
            );
        };
        let init = std::env::var_os("CODELIA_INIT").map(PathBuf::from);
        Ok(Self { codelia, init })
    }

    /// The programs of another build in the directory that `CODELIA_TEST_PREVIOUS` names, if it is
    /// set.
    #[must_use]
    pub fn previous() -> Option<Self> {
        let directory = PathBuf::from(std::env::var_os("CODELIA_TEST_PREVIOUS")?);
        Some(Self { codelia: directory.join("codelia"), init: None })
    }

    /// Copies both programs into `dir`, where any user may execute them. The copy of `codelia`
    /// finds `codelia-init` in its own directory.
    pub fn copied_into(&self, dir: &Path) -> Result<Self> {
        let copy = dir.join("codelia");
        std::fs::copy(&self.codelia, &copy)?;
        let neighbour = self.codelia.with_file_name("codelia-init");
        std::fs::copy(self.init.as_ref().unwrap_or(&neighbour), dir.join("codelia-init")).context(
            "copy codelia-init: run `make test`, or `scripts/build-init` and set CODELIA_INIT",
        )?;
        Ok(Self { codelia: copy, init: None })
    }

    /// The path of `codelia`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.codelia
    }

    /// Builds a `codelia` command with a clean environment. The process dies with the thread that
    /// starts it, so that nothing outlives a killed test.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM", "--"]).arg(&self.codelia);
        self.set_environment(&mut command);
        command
    }

    /// Builds the same command for another user with this home directory.
    #[must_use]
    pub fn command_as(&self, uid: u32, home: &Path) -> Command {
        let mut command = Command::new("setpriv");
        let id = uid.to_string();
        command.args([
            "--reuid",
            &id,
            "--regid",
            &id,
            "--clear-groups",
            "--pdeathsig",
            "TERM",
            "--",
        ]);
        command.arg(&self.codelia);
        self.set_environment(&mut command);
        command.env("HOME", home);
        command
    }

    /// Replaces the environment of a command by the variables that `codelia` needs.
    pub fn set_environment(&self, command: &mut Command) {
        command.env_clear().current_dir("/");
        for name in ["PATH", "HOME", "LANG", "TMPDIR"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        if let Some(init) = &self.init {
            command.env("CODELIA_INIT", init);
        }
        if let Some(nsjail) = std::env::var_os("CODELIA_NSJAIL") {
            command.env("CODELIA_NSJAIL", nsjail);
        }
    }
}
