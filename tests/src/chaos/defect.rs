//! Defects that a test plants, to show that the checks notice them.

/// A planted defect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Defect {
    /// The leases of all workers end in the database once, without a fault.
    LeaseEnded,
    /// A byte of long stored output changes.
    OutputChanged,
    /// Uploaded files change on the disk.
    FileChanged,
    /// Watchers resume one byte too early.
    WatchOverlap,
    /// The second tenant has the key of the first.
    SharedKey,
    /// Sessions that should expire are closed.
    SessionClosed,
}

impl Defect {
    /// All defects.
    pub const ALL: [Self; 6] = [
        Self::LeaseEnded,
        Self::OutputChanged,
        Self::FileChanged,
        Self::WatchOverlap,
        Self::SharedKey,
        Self::SessionClosed,
    ];

    /// Statements that plant it in the database.
    pub(crate) fn statements(self) -> Option<&'static str> {
        match self {
            Self::OutputChanged => Some(
                "CREATE FUNCTION chaos_change() RETURNS trigger LANGUAGE plpgsql AS $$
                 BEGIN NEW.data := set_byte(NEW.data, 500, 33); NEW.length := NEW.length - 1; RETURN NEW; END $$;
                 CREATE TRIGGER chaos_change BEFORE INSERT ON run_output
                 FOR EACH ROW WHEN (coalesce(NEW.length, octet_length(NEW.data)) > 500) EXECUTE FUNCTION chaos_change();",
            ),
            Self::SessionClosed => Some(
                "CREATE FUNCTION chaos_close() RETURNS trigger LANGUAGE plpgsql AS $$
                 BEGIN NEW.end_reason := 'closed'; RETURN NEW; END $$;
                 CREATE TRIGGER chaos_close BEFORE UPDATE ON sessions
                 FOR EACH ROW WHEN (NEW.end_reason = 'expired') EXECUTE FUNCTION chaos_close();",
            ),
            _ => None,
        }
    }
}
