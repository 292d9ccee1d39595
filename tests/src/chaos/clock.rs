//! A clock of Postgres that can jump: a small library, loaded before all others, adds an offset
//! from a file to the time of day.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::server::Server;

const SOURCE: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long *offset;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) abort();
    offset = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int result = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"#;

/// The clock of one server.
#[derive(Debug)]
pub(crate) struct Clock {
    offset: PathBuf,
}

impl Clock {
    /// Gives a server that is not running its own clock.
    pub(crate) fn install(server: &mut Server, directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory)?;
        let (source, library) = (directory.join("clock.c"), directory.join("clock.so"));
        fs::write(&source, SOURCE)?;
        let mut compile = Command::new("cc");
        let status =
            compile.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).status();
        ensure!(status.context("cc")?.success(), "cc cannot compile {}", source.display());
        let clock = Self { offset: directory.join("offset") };
        clock.set(0)?;
        for (path, mode) in [(directory, 0o755), (&library, 0o755), (&clock.offset, 0o644)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        }
        server.set_environment("LD_PRELOAD", &library);
        server.set_environment("CHAOS_CLOCK", &clock.offset);
        Ok(clock)
    }

    /// Sets how many seconds it is ahead of the real time, in place: the server has it mapped.
    pub(crate) fn set(&self, seconds: i64) -> Result<()> {
        use std::{fs::File, io::Write};
        let mut file =
            File::options().create(true).truncate(false).write(true).open(&self.offset)?;
        Ok(file.write_all(&seconds.to_ne_bytes())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;

    async fn hours_ahead(server: &Server) -> Result<i64> {
        let mut connection = server.connect("postgres").await?;
        // What the client knows is the real time.
        let real = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
        let query = "SELECT round((extract(epoch FROM now()) - $1) / 3600)::bigint";
        Ok(sqlx::query_scalar(query).bind(i64::try_from(real)?).fetch_one(&mut connection).await?)
    }

    #[tokio::test]
    async fn clock_of_postgres_jumps_both_ways() -> Result<()> {
        let scratch = Scratch::new()?;
        let mut server = Server::create(&scratch.join("postgres"))?;
        let clock = Clock::install(&mut server, &scratch.join("clock"))?;
        server.start().await?;
        assert_eq!(hours_ahead(&server).await?, 0);
        for hours in [5, -5, 0] {
            clock.set(hours * 3600)?;
            assert_eq!(hours_ahead(&server).await?, hours);
        }
        server.stop().await
    }
}
