//! Patterns of hosts: what they match, what two of them match together, and lists of them.
//!
//! A pattern is an exact name, an IP address, `*.` and a name for all names below it, `*` for all
//! names, or a name with one `*` inside a label that is not the last one. The family is closed
//! under intersection, so that merging policies needs nothing else. Only an exact pattern matches
//! an address.

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
};

use crate::{host_sets, size::MAX_ENTRIES};

const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// Why a text is not a host pattern.
pub(crate) const EXPECTED: &str = "must be a lower-case host name, `*.` and a name, `*`, a name with one `*` in \
     a label that is not the last, an IP address in its shortest form, or `set:` and the name of a set";

/// Whether the text is a host pattern.
pub(crate) fn is_pattern(text: &str) -> bool {
    if let Ok(address) = text.parse::<IpAddr>() {
        return address.to_canonical().to_string() == text;
    }
    let name = text.strip_prefix("*.").unwrap_or(text);
    let stars = name.bytes().filter(|byte| *byte == b'*').count();
    let last = name.rsplit('.').next().unwrap_or_default();
    text == "*"
        || stars <= 1
            && is_dns_name(name, |byte| byte == b'*')
            && !last.contains('*')
            && !(text != name && name.starts_with("*."))
}

/// Whether the text is a host name in lower case, and not a number that some programs read as an
/// address.
pub(crate) fn is_name(text: &str) -> bool {
    is_dns_name(text, |_| false)
}

fn is_dns_name(text: &str, also: impl Fn(u8) -> bool) -> bool {
    let is_byte = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_') || also(byte);
    let is_label =
        |label: &str| (1..=MAX_LABEL).contains(&label.len()) && label.bytes().all(is_byte);
    text.len() <= MAX_NAME && text.split('.').all(is_label) && !ends_in_number(text)
}

/// Whether the last label is a number: then programs read the whole as an IPv4 address.
fn ends_in_number(text: &str) -> bool {
    let last = text.rsplit('.').next().unwrap_or_default();
    let hex =
        last.strip_prefix("0x").is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
    hex || last.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_address(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok()
}

/// The first pattern that matches a host: a lower-case name without a final dot, or an address.
pub(crate) fn find<'a>(patterns: &'a [String], host: &str) -> Option<&'a str> {
    let is_name = is_name(host);
    let matches = |pattern: &&String| *pattern == host || is_name && covers(pattern, host);
    patterns.iter().find(matches).map(String::as_str)
}

/// Whether one pattern matches every host that another one matches. Neither is an address.
fn covers(upper: &str, lower: &str) -> bool {
    let ((above, upper), (below, lower)) = (split(upper), split(lower));
    let mut rest = labels(lower);
    let covered =
        labels(upper).all(|label| rest.next().is_some_and(|lower| label_covers(label, lower)));
    covered && if above { below || rest.next().is_some() } else { !below && rest.next().is_none() }
}

/// Whether a pattern starts with `*.` or is `*`, and the labels after that.
fn split(pattern: &str) -> (bool, &str) {
    match pattern.strip_prefix("*.") {
        Some(name) => (true, name),
        None if pattern == "*" => (true, ""),
        None => (false, pattern),
    }
}

/// The labels from the last to the first.
fn labels(name: &str) -> impl Iterator<Item = &str> {
    name.rsplit('.').filter(|label| !label.is_empty())
}

fn label_covers(upper: &str, lower: &str) -> bool {
    let Some((prefix, suffix)) = upper.split_once('*') else { return upper == lower };
    match lower.split_once('*') {
        Some((start, end)) => start.starts_with(prefix) && end.ends_with(suffix),
        None => {
            lower.len() >= prefix.len() + suffix.len()
                && lower.starts_with(prefix)
                && lower.ends_with(suffix)
        }
    }
}

/// The patterns that together match what both match.
fn intersection(a: &str, b: &str) -> Vec<String> {
    if a == b {
        return vec![a.to_owned()];
    }
    let ((mut a_below, a), (mut b_below, b)) = (split(a), split(b));
    let mut long: Vec<_> = labels(a).collect();
    let mut short: Vec<_> = labels(b).collect();
    if long.len() < short.len() {
        (long, short, a_below, b_below) = (short, long, b_below, a_below);
    }
    let possible = match (a_below, b_below) {
        (true, true) => true,
        (false, true) => long.len() > short.len(),
        (false, false) => long.len() == short.len(),
        (true, false) => false,
    };
    if !possible {
        return Vec::new();
    }
    // From the last label on, as at most one pair of labels gives more than one result.
    let mut names = vec![String::new()];
    for (at, label) in long.iter().enumerate() {
        let both = short
            .get(at)
            .map_or_else(|| vec![(*label).to_owned()], |other| both_labels(label, other));
        let join = |name: &String| {
            let name = if name.is_empty() { String::new() } else { format!(".{name}") };
            both.iter().map(move |label| format!("{label}{name}")).collect::<Vec<_>>()
        };
        names = names.iter().flat_map(join).collect();
    }
    let full = |name: String| match (a_below, name.is_empty()) {
        (true, true) => "*".to_owned(),
        (true, false) => format!("*.{name}"),
        (false, _) => name,
    };
    // A longer one matches no valid name.
    names.into_iter().map(full).filter(|pattern| is_pattern(pattern)).collect()
}

/// The labels that together match what both match.
fn both_labels(a: &str, b: &str) -> Vec<String> {
    if label_covers(a, b) {
        return vec![b.to_owned()];
    }
    if label_covers(b, a) {
        return vec![a.to_owned()];
    }
    let (Some((start, end)), Some((other_start, other_end))) =
        (a.split_once('*'), b.split_once('*'))
    else {
        return Vec::new();
    };
    let prefix = if start.len() >= other_start.len() { start } else { other_start };
    let suffix = if end.len() >= other_end.len() { end } else { other_end };
    let fits = [start, other_start].iter().all(|start| prefix.starts_with(start))
        && [end, other_end].iter().all(|end| suffix.ends_with(end));
    if !fits {
        return Vec::new();
    }
    // `ab*` and `*bc` match `abc` as well as `ab*bc`.
    let shortest = (start.len() + end.len()).max(other_start.len() + other_end.len());
    let overlap = |n| suffix.split_at_checked(n).filter(|(start, _)| prefix.ends_with(start));
    let overlaps = (1..=prefix.len() + suffix.len() - shortest).filter_map(overlap);
    let exact = overlaps.map(|(_, rest)| format!("{prefix}{rest}"));
    exact.chain([format!("{prefix}*{suffix}")]).collect()
}

/// The patterns of a list, with its sets replaced by their patterns.
pub(crate) fn expand(list: &[String]) -> Vec<String> {
    list.iter()
        .flat_map(|entry| match entry.strip_prefix(host_sets::PREFIX) {
            Some(name) => host_sets::hosts(name).map(str::to_owned).collect(),
            None => vec![entry.clone()],
        })
        .collect()
}

/// Whether a pattern has a `*` inside a label. Lists may have few of them.
pub(crate) fn is_glob(pattern: &str) -> bool {
    split(pattern).1.contains('*')
}

/// The list that says the same with the fewest patterns, sorted.
pub(crate) fn normalized(list: Vec<String>) -> Vec<String> {
    let list: BTreeSet<_> = list.into_iter().collect();
    let index = Index::new(list.iter());
    list.iter().filter(|pattern| !index.covers_below(pattern)).cloned().collect()
}

/// The patterns of `list` that none of `upper` covers.
pub(crate) fn not_covered(list: Vec<String>, upper: &[String]) -> Vec<String> {
    let index = Index::new(upper);
    list.into_iter().filter(|pattern| !index.covers(pattern)).collect()
}

/// The patterns that match what both lists match.
///
/// More than [`MAX_ENTRIES`] that neither list has are too many for a policy: the rest is left out,
/// and the size of the result shows it.
pub(crate) fn intersect(a: &[String], b: &[String]) -> Vec<String> {
    let in_a = Index::new(a);
    let in_b = Index::new(b);
    let mut both: Vec<_> =
        a.iter().chain(b).filter(|item| in_a.covers(item) && in_b.covers(item)).cloned().collect();
    let pairs = in_a.globs.iter().flat_map(|glob| in_b.wildcards().map(|other| (*glob, other)));
    let pairs = pairs
        .chain(in_b.globs.iter().flat_map(|glob| in_a.wildcards().map(|other| (*glob, other))));
    let mut made = BTreeSet::new();
    for (glob, other) in pairs {
        made.extend(intersection(glob, other));
        if made.len() > MAX_ENTRIES {
            both.extend(made);
            return both;
        }
    }
    both.extend(made);
    normalized(both)
}

/// The first entry of a list that has nothing in common with the patterns of `upper`.
pub(crate) fn first_outside(list: &[String], upper: &[String]) -> Option<usize> {
    let index = Index::new(upper);
    let overlaps = |pattern: &String| {
        index.covers(pattern) || upper.iter().any(|other| !is_disjoint(pattern, other))
    };
    list.iter().position(|entry| !expand(std::slice::from_ref(entry)).iter().any(overlaps))
}

fn is_disjoint(a: &str, b: &str) -> bool {
    a != b && (is_address(a) || is_address(b) || intersection(a, b).is_empty())
}

/// A list of patterns, to find out quickly whether one of them covers another pattern.
#[derive(Debug)]
struct Index<'a> {
    all: HashSet<&'a str>,
    /// The patterns that start with `*`, without it.
    suffixes: HashSet<&'a str>,
    /// The patterns with a `*` inside a label.
    globs: Vec<&'a str>,
}

impl<'a> Index<'a> {
    fn new(patterns: impl IntoIterator<Item = &'a String>) -> Self {
        let mut all = HashSet::new();
        let mut suffixes = HashSet::new();
        let mut globs = Vec::new();
        for pattern in patterns.into_iter().map(String::as_str) {
            all.insert(pattern);
            if is_glob(pattern) {
                globs.push(pattern);
            } else if let Some(suffix) = pattern.strip_prefix('*') {
                suffixes.insert(suffix);
            }
        }
        Self { all, suffixes, globs }
    }

    /// Whether one pattern matches every host that `lower` matches.
    fn covers(&self, lower: &str) -> bool {
        self.all.contains(lower) || self.covers_below(lower)
    }

    /// Whether a pattern other than `lower` matches every host that it matches.
    fn covers_below(&self, lower: &str) -> bool {
        if is_address(lower) {
            return false;
        }
        let name = lower.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(lower);
        let mut suffixes =
            name.match_indices('.').filter(|(at, _)| *at > 0).map(|(at, _)| &name[at..]);
        lower != "*" && self.suffixes.contains("")
            || suffixes.any(|suffix| self.suffixes.contains(suffix))
            || self.globs.iter().any(|glob| *glob != lower && covers(glob, lower))
    }

    /// The patterns that are not exact.
    fn wildcards(&self) -> impl Iterator<Item = &'a str> {
        self.all.iter().copied().filter(|pattern| pattern.contains('*'))
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    #[test]
    fn patterns_are_checked() {
        let long = format!("{}.com", "a".repeat(64));
        for valid in [
            "example.com",
            "a_b.example.com",
            "xn--bcher-kva.example",
            "*",
            "*.com",
            "*.example.com",
            "api-*.example.com",
            "*-api.example.com",
            "s3.*.amazonaws.com",
            "*.a*b.example.com",
            "localhost",
            "192.0.2.1",
            "2001:db8::1",
        ] {
            assert!(is_pattern(valid), "{valid}");
        }
        for invalid in [
            "",
            ".",
            "*.",
            ".example.com",
            "example.com.",
            "a..b",
            "Example.com",
            "bücher.example",
            "**",
            "*.*",
            "*.*.com",
            "example.*",
            "a*b*.example.com",
            "a*.b*.com",
            "*example",
            "127.1",
            "0x7f.1",
            "2130706433",
            "1.2.3.0x4",
            "*.1",
            "192.0.2.01",
            "2001:DB8::1",
            "2001:db8:0::1",
            "::ffff:192.0.2.1",
            "[2001:db8::1]",
            "fe80::1%eth0",
            "a b.com",
            "a/b",
            "user@host",
            "host:80",
            "https://host",
            &long,
        ] {
            assert!(!is_pattern(invalid), "{invalid}");
        }
    }

    #[test]
    fn wildcard_matches_names_below_it_only() {
        for (pattern, host, matched) in [
            ("*.example.com", "a.b.example.com", true),
            ("*.example.com", "example.com", false),
            ("*.example.com", "aexample.com", false),
            ("api-*.example.com", "api-eu.example.com", true),
            ("api-*.example.com", "api-.example.com", true),
            ("api-*.example.com", "api-eu.x.example.com", false),
            ("api-*.example.com", "x.api-eu.example.com", false),
            ("a*a.example.com", "a.example.com", false),
            ("s3.*.example.com", "s3.eu.example.com", true),
            ("s3.*.example.com", "s3.eu.west.example.com", false),
            ("*.api-*.example.com", "x.y.api-1.example.com", true),
            ("*", "localhost", true),
            ("*", "192.0.2.1", false),
            ("*", "2001:db8::1", false),
            ("*", "127.1", false),
            ("*", "0x7f000001", false),
            ("*.2.1", "192.0.2.1", false),
            ("*.example.com", "a\0.example.com", false),
            ("*.example.com", ".example.com", false),
            ("*.example.com", "a..example.com", false),
            ("192.0.2.1", "192.0.2.1", true),
            ("2001:db8::1", "2001:db8::1", true),
        ] {
            assert_eq!(find(&[pattern.to_owned()], host).is_some(), matched, "{pattern} {host}");
        }
    }

    #[test]
    fn partial_overlap_is_kept() {
        let of = |patterns: &[&str]| patterns.iter().map(|&p| p.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            intersect(&of(&["api-*.x.com"]), &of(&["*-eu.x.com"])),
            of(&["api-*-eu.x.com", "api-eu.x.com"])
        );
        assert_eq!(intersect(&of(&["a.*.com"]), &of(&["*.x.com"])), of(&["a.x.com"]));
        assert_eq!(intersect(&of(&["a*.x.com"]), &of(&["ab.*.com"])), of(&["ab.x.com"]));
        assert_eq!(intersect(&of(&["*"]), &of(&["192.0.2.1", "a.x"])), of(&["a.x"]));
    }

    #[test]
    fn too_many_overlaps_stay_visible() {
        let starts: Vec<_> =
            ('a'..='z').flat_map(|c| ('a'..='z').map(move |d| format!("{c}{d}*.x.com"))).collect();
        let ends: Vec<_> = ('a'..='z').map(|c| format!("*{c}.x.com")).collect();
        assert!(intersect(&starts, &ends).len() > MAX_ENTRIES);
    }

    /// Few letters and labels, so that patterns overlap.
    fn label() -> impl Strategy<Value = String> {
        "[ab]{1,3}".prop_map(String::from)
    }

    fn name() -> impl Strategy<Value = String> {
        vec(label(), 1..4).prop_map(|labels| labels.join("."))
    }

    fn glob() -> impl Strategy<Value = String> {
        let glob = ("[ab]{0,2}", "[ab]{0,2}").prop_map(|(start, end)| format!("{start}*{end}"));
        let inner = (vec(label(), 0..2), glob, vec(label(), 1..3));
        inner.prop_map(|(before, glob, after)| [before, vec![glob], after].concat().join("."))
    }

    fn pattern() -> impl Strategy<Value = String> {
        prop_oneof![
            name(),
            name().prop_map(|name| format!("*.{name}")),
            glob(),
            glob().prop_map(|name| format!("*.{name}")),
            select(vec!["*".to_owned(), "10.0.0.1".to_owned()]),
        ]
        .prop_filter("not a pattern", |text| is_pattern(text))
    }

    fn lists() -> impl Strategy<Value = Vec<String>> {
        vec(pattern(), 0..4)
    }

    fn hosts() -> impl Strategy<Value = String> {
        prop_oneof![9 => name(), 1 => Just("10.0.0.1".to_owned())]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn intersection_matches_what_both_match(a in lists(), b in lists(), hosts in vec(hosts(), 20)) {
            let both = intersect(&a, &b);
            prop_assert!(both.iter().all(|pattern| is_pattern(pattern)), "{both:?}");
            for host in &hosts {
                let expected = find(&a, host).is_some() && find(&b, host).is_some();
                prop_assert_eq!(find(&both, host).is_some(), expected, "{} of {:?} and {:?}: {:?}", host, a, b, both);
            }
        }

        #[test]
        fn normalized_list_matches_the_same(list in lists(), hosts in vec(hosts(), 20)) {
            let short = normalized(list.clone());
            prop_assert_eq!(&normalized(short.clone()), &short);
            for host in &hosts {
                prop_assert_eq!(find(&short, host).is_some(), find(&list, host).is_some(), "{}", host);
            }
        }

        #[test]
        fn cover_means_that_all_hosts_match(upper in pattern(), lower in pattern(), hosts in vec(hosts(), 20)) {
            let (upper, lower) = ([upper], [lower]);
            if Index::new(&upper).covers(&lower[0]) {
                for host in &hosts {
                    prop_assert!(find(&lower, host).is_none() || find(&upper, host).is_some(), "{}", host);
                }
            }
            prop_assert_eq!(first_outside(&lower, &upper).is_some(), intersect(&lower, &upper).is_empty());
        }
    }
}
