//! Sandbox modes and network modes.

use crate::words;

words! {
    /// Which backend isolates a run, weakest first.
    #[derive(Hash, PartialOrd, Ord)]
    pub enum Mode {
        /// Private directory, clean environment, limits. Isolates nothing; for development.
        Logical = "logical",
        /// Namespaces through bubblewrap.
        Bwrap = "bwrap",
        /// Namespaces through nsjail.
        Nsjail = "nsjail",
        /// Namespaces that Codelia makes itself, out of a zygote for each session.
        Native = "native",
        /// A container for each run.
        Container = "container",
    }
}

words! {
    /// The network that a run may reach, tightest first.
    #[derive(Hash, PartialOrd, Ord)]
    pub enum NetworkMode {
        /// Loopback only.
        None = "none",
        /// Through the egress proxy only.
        Proxy = "proxy",
        /// The host's network.
        Host = "host",
    }
}
