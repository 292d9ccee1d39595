//! Suggestions for mistyped names.

/// Largest edit distance of a suggested name.
const MAX_HINT_DISTANCE: usize = 3;

/// Returns `; did you mean X?` if one of `known` is similar.
pub fn hint<'a>(wrong: &str, known: impl Iterator<Item = &'a str>) -> String {
    let nearest = known.map(|name| (distance(wrong, name), name)).min();
    nearest
        .filter(|(distance, _)| *distance <= MAX_HINT_DISTANCE)
        .map(|(_, name)| format!("; did you mean {name}?"))
        .unwrap_or_default()
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let nearest = (diagonal + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], nearest);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_get_a_hint() {
        let names = || ["sandbox.mode", "api.listen"].into_iter();
        assert_eq!(hint("sandbox.mod", names()), "; did you mean sandbox.mode?");
        assert_eq!(hint("completely.else", names()), "");
    }
}
