//! Arguments of `codelia volume`, and the value of `--volume`.

use std::time::Duration;

use clap::Subcommand;
use codelia_policy::{VolumeMode, VolumeMount};

use super::values::{bytes, duration};

#[derive(Debug, Subcommand)]
pub enum Volumes {
    /// Create a volume, empty
    #[command(after_help = "\
Examples:
  codelia volume create cargo
  codelia volume create pip --max-size 1g --ttl 7days
  codelia run --volume cargo:/cache/cargo:rw -e CARGO_HOME=/cache/cargo -- cargo build")]
    Create {
        /// Name of the volume: [a-z0-9-]
        name: String,
        /// Stop runs that make it larger, such as 500m [default: 5g, max: 20g]
        #[arg(long = "max-size", value_name = "SIZE", value_parser = bytes, allow_negative_numbers = true)]
        max_bytes: Option<i64>,
        /// Delete it when it was not used for this long [default: 30days, max: 365days]
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        ttl: Option<Duration>,
        /// Let only sessions of this project mount it
        #[arg(long, value_name = "NAME")]
        project: Option<String>,
    },
    /// List volumes
    #[command(visible_alias = "list")]
    Ls,
    /// Show a volume
    Show {
        /// Name of the volume
        volume: String,
    },
    /// Delete a volume with its content, if no session mounts it
    Rm {
        /// Name of the volume
        volume: String,
    },
}

/// Parses `NAME:/path` or `NAME:/path:MODE`.
pub(super) fn volume_mount(text: &str) -> Result<VolumeMount, String> {
    let expected = "expected NAME:/path[:ro|rw|copy], such as cargo:/cache/cargo:rw";
    let mut parts = text.splitn(3, ':');
    let (Some(name), Some(path)) = (parts.next(), parts.next()) else {
        return Err(expected.to_owned());
    };
    let mode = match parts.next() {
        None | Some("copy") => VolumeMode::Copy,
        Some("ro" | "read_only") => VolumeMode::ReadOnly,
        Some("rw" | "exclusive") => VolumeMode::Exclusive,
        Some(other) => return Err(format!("unknown mode {other:?} (use ro, rw or copy)")),
    };
    if name.is_empty() || !path.starts_with('/') {
        return Err(expected.to_owned());
    }
    Ok(VolumeMount { name: name.to_owned(), path: path.into(), mode })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_has_name_path_and_mode() {
        let mount =
            |text: &str| volume_mount(text).map(|mount| (mount.name, mount.path, mount.mode));
        assert_eq!(mount("a:/b"), Ok(("a".into(), "/b".into(), VolumeMode::Copy)));
        assert_eq!(mount("a:/b:rw"), Ok(("a".into(), "/b".into(), VolumeMode::Exclusive)));
        assert_eq!(mount("a:/b:ro"), Ok(("a".into(), "/b".into(), VolumeMode::ReadOnly)));
        for bad in ["a", "a:b", ":/b", "a:/b:x", ""] {
            assert!(mount(bad).is_err(), "{bad:?}");
        }
    }
}
