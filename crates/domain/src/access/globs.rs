//! Which policies a key may access: patterns for policy names, in which `*` stands for any characters.

use std::{fmt, sync::Arc};

use crate::ids::POLICY_NAME_BYTES_MAX;

/// The most globs that one key may have. The bound exists because every request is compared with all of them.
pub const GLOBS_MAX: usize = 64;

/// Why texts are not valid globs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidGlobs {
    /// There are no globs, or more than [`GLOBS_MAX`].
    #[error("must be 1 to {GLOBS_MAX} names of policies, in which `*` stands for any characters")]
    Count,
    /// A glob is too long, or contains a character that no policy name contains.
    #[error("must match [A-Za-z0-9._*-]{{1,128}}: a policy's name, in which `*` stands for any characters")]
    Glob,
}

/// The policies that a key may access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyGlobs(Arc<[String]>);

impl PolicyGlobs {
    /// All policies.
    #[must_use]
    pub fn all() -> Self {
        Self(Arc::new(["*".to_owned()]))
    }

    /// Parses globs. An error comes with the index of the invalid glob.
    pub fn parse(globs: &[impl AsRef<str>]) -> Result<Self, (usize, InvalidGlobs)> {
        if !(1..=GLOBS_MAX).contains(&globs.len()) {
            return Err((0, InvalidGlobs::Count));
        }
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'*');
        let valid = |glob: &str| (1..=POLICY_NAME_BYTES_MAX).contains(&glob.len()) && glob.bytes().all(allowed);
        if let Some(index) = globs.iter().position(|glob| !valid(glob.as_ref())) {
            return Err((index, InvalidGlobs::Glob));
        }
        Ok(Self(globs.iter().map(|glob| glob.as_ref().to_owned()).collect()))
    }

    /// The globs as the caller wrote them.
    #[must_use]
    pub fn as_slice(&self) -> &[String] {
        &self.0
    }

    /// Whether every policy matches, including policies that do not exist yet.
    #[must_use]
    pub fn are_all(&self) -> bool {
        self.0.iter().any(|glob| glob.bytes().all(|byte| byte == b'*'))
    }

    /// Whether a policy with this name matches.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        self.0.iter().any(|glob| glob_matches(glob.as_bytes(), name.as_bytes()))
    }
}

impl fmt::Display for PolicyGlobs {
    /// Joins the globs with commas, because no glob contains a comma.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

/// Whether a glob matches a name. The worst-case time is proportional to the product of their lengths.
fn glob_matches(glob: &[u8], name: &[u8]) -> bool {
    let (mut at_glob, mut at_name) = (0, 0);
    // Where to continue after a mismatch: behind the last star, which then covers one more character.
    let mut retry: Option<(usize, usize)> = None;
    while at_name < name.len() {
        match glob.get(at_glob) {
            Some(b'*') => {
                at_glob += 1;
                retry = Some((at_glob, at_name));
            }
            Some(byte) if *byte == name[at_name] => {
                at_glob += 1;
                at_name += 1;
            }
            _ => {
                let Some((after_star, taken)) = retry else { return false };
                retry = Some((after_star, taken + 1));
                (at_glob, at_name) = (after_star, taken + 1);
            }
        }
    }
    glob[at_glob..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_characters_and_all_else_for_itself() {
        let globs = PolicyGlobs::parse(&["math.*", "default", "*-eval", "a*b*c"]).expect("they are globs");
        for name in ["math.solver", "math.", "math.a.b", "default", "x-eval", "-eval", "abc", "aXbYbZc"] {
            assert!(globs.matches(name), "{name}");
        }
        for name in ["math", "mathx", "default2", "Default", "eval", "x-evals", "ab", "acb", ""] {
            assert!(!globs.matches(name), "{name}");
        }
        assert!(!globs.are_all());
        assert!(PolicyGlobs::parse(&["x", "**"]).expect("they are globs").are_all());
    }

    #[test]
    fn what_no_policy_could_be_called_is_no_glob() {
        assert_eq!(PolicyGlobs::parse(&[] as &[&str]), Err((0, InvalidGlobs::Count)));
        assert_eq!(PolicyGlobs::parse(&["a", "a,b"]), Err((1, InvalidGlobs::Glob)));
        for glob in ["", "a b", "a/b", "a?"] {
            assert_eq!(PolicyGlobs::parse(&[glob]), Err((0, InvalidGlobs::Glob)), "{glob:?}");
        }
        assert_eq!(PolicyGlobs::parse(&vec!["a"; GLOBS_MAX + 1]), Err((0, InvalidGlobs::Count)));
    }
}
