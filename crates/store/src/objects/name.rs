//! Names of objects: `DAY/RUN_INCARNATION_POSITION_LENGTH`.
//!
//! An incarnation executes a run at most once, so a name never stands for two contents: a repeated
//! flush writes the same bytes again, and a fenced worker cannot change what another one stored.

use std::{fmt, str::FromStr};

use codelia_types::{Incarnation, RunId};
use time::macros::format_description;
use uuid::Uuid;

use crate::id_time::made_at;

/// Name of an object with output of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ObjectName {
    pub(crate) run: RunId,
    pub(crate) incarnation: Incarnation,
    /// Position of the first byte in the run's output.
    pub(crate) position: i64,
    /// Bytes in the object.
    pub(crate) length: i64,
}

/// The day of a run's id, such as `20300131`. `run_day` in the database is the same.
fn day(run: RunId) -> String {
    let day =
        made_at(run.0).and_then(|time| time.format(format_description!("[year][month][day]")).ok());
    // An id of a clock that is thousands of years ahead.
    day.unwrap_or_else(|| "99991231".to_owned())
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { run, incarnation, position, length } = self;
        write!(f, "{}/{}_{}_{position}_{length}", day(*run), run.0, incarnation.0)
    }
}

impl FromStr for ObjectName {
    type Err = InvalidName;

    /// Accepts only what [`fmt::Display`] makes: a name from a row becomes a path.
    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let (_, file) = text.split_once('/').ok_or(InvalidName)?;
        let mut parts = file.split('_');
        let mut next = || parts.next().ok_or(InvalidName);
        let name = Self {
            run: RunId(Uuid::try_parse(next()?).map_err(|_| InvalidName)?),
            incarnation: Incarnation(Uuid::try_parse(next()?).map_err(|_| InvalidName)?),
            position: next()?.parse().map_err(|_| InvalidName)?,
            length: next()?.parse().map_err(|_| InvalidName)?,
        };
        if name.to_string() == text { Ok(name) } else { Err(InvalidName) }
    }
}

/// The text is not the name of an object with output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InvalidName;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_names_are_accepted() {
        let run = RunId("01920a3c-5c00-7000-8000-000000000001".parse().unwrap());
        let incarnation = Incarnation("01920a3c-5c00-7000-8000-000000000002".parse().unwrap());
        let name = ObjectName { run, incarnation, position: 7, length: 20_000 };
        let text = name.to_string();
        assert_eq!(text, format!("20240919/{}_{}_7_20000", run.0, incarnation.0));
        assert_eq!(text.parse(), Ok(name));
        let file = text.strip_prefix("20240919/").unwrap();
        for wrong in [
            format!("../{file}"),
            format!("20240918/{file}"),
            format!("20240919/../{file}"),
            format!("/{text}"),
            format!("{text}_1"),
            format!("{text}/.."),
            text.to_uppercase().replace("_7_", "_+7_"),
            "codelia-store-id".to_owned(),
        ] {
            assert_eq!(wrong.parse::<ObjectName>(), Err(InvalidName), "{wrong}");
        }
    }
}
