//! The forms of a database URL.

use std::path::Path;

use super::error::OpenError;

/// The kind and the address of a database.
pub(super) enum Place<'u> {
    Temporary,
    File(&'u Path),
    Postgres,
}

impl<'u> Place<'u> {
    pub(super) fn of(url: &'u str) -> Result<Self, OpenError> {
        let path = url.strip_prefix("sqlite:").map(|path| path.strip_prefix("//").unwrap_or(path));
        match path {
            _ if url == "sqlite::memory:" => Ok(Self::Temporary),
            Some(path) if !path.is_empty() => Ok(Self::File(Path::new(path))),
            _ if url.starts_with("postgres://") || url.starts_with("postgresql://") => Ok(Self::Postgres),
            _ => Err(OpenError::Url(redact(url))),
        }
    }
}

/// The file that a URL names, if it names one.
pub(crate) fn sqlite_path(url: &str) -> Option<&Path> {
    match Place::of(url) {
        Ok(Place::File(path)) => Some(path),
        _ => None,
    }
}

/// A database URL that may be shown: without the password, and without parameters, which may contain a password as
/// well.
#[must_use]
pub fn redact(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let rest = match rest.rsplit_once('@') {
        // The user ends at the first colon, and the password at the last at-sign.
        Some((user, host)) => format!("{}@{host}", user.split(':').next().unwrap_or_default()),
        None => rest.to_owned(),
    };
    format!("{scheme}://{}", rest.split('?').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::redact;

    #[test]
    fn passwords_stay_out_of_messages() {
        assert_eq!(redact("postgres://me:se:cret@db/forebay"), "postgres://me@db/forebay");
        assert_eq!(redact("postgres://me:p@ss@db/forebay"), "postgres://me@db/forebay");
        assert_eq!(redact("postgres://db/forebay?user=me&password=secret"), "postgres://db/forebay");
        assert_eq!(redact("postgers://me:secret@db/forebay"), "postgers://me@db/forebay");
        assert_eq!(redact("postgres://db/forebay"), "postgres://db/forebay");
        assert_eq!(redact("sqlite:data/forebay.db"), "sqlite:data/forebay.db");
    }
}
