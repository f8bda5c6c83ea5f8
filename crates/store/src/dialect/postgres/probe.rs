//! One connection before the pool is opened, which turns the server's first answer into an error that says what to do.
//!
//! It is separate from the pool, because the pool tries again for as long as a request may wait, and then only reports
//! a timeout.

use std::{io::ErrorKind, time::Duration};

use sqlx::{Connection as _, PgConnection, Row as _, postgres::PgConnectOptions};

use super::{Postgres, tls};
use crate::open::{error::OpenError, url::redact};

/// How long connecting to the server may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

impl Postgres {
    /// Checks that the URL can be parsed.
    pub(crate) fn check_url(url: &str) -> Result<(), OpenError> {
        options(url).map(drop)
    }

    /// Connects once. Returns whether the database does not have this service's schema yet.
    pub(crate) async fn probe(url: &str) -> Result<bool, OpenError> {
        let options = options(url)?;
        let unreachable = |why: String| OpenError::Unreachable { name: redact(url), why };
        let look = async {
            let mut connection = PgConnection::connect_with(&options).await?;
            // This uses no prepared statement, so that it works behind a pooler.
            let found =
                sqlx::raw_sql("SELECT to_regclass('_sqlx_migrations')::TEXT").fetch_one(&mut connection).await?;
            let table: Option<String> = found.try_get(0)?;
            connection.close().await?;
            Ok(table.is_none())
        };
        match tokio::time::timeout(CONNECT_TIMEOUT, look).await {
            Ok(outcome) => outcome.map_err(|error: sqlx::Error| unreachable(describe(&error, url, &options))),
            Err(_) => Err(unreachable(format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()))),
        }
    }
}

/// The options of every connection.
pub(super) fn options(url: &str) -> Result<PgConnectOptions, OpenError> {
    let settings = |error: sqlx::Error| OpenError::Settings(format!("database URL {}: {error}", redact(url)));
    let options: PgConnectOptions = url.parse().map_err(settings)?;
    // PgBouncer refuses startup parameters that it does not know. This one only affects numbers in text form, which are
    // not used.
    Ok(tls::unless_local(options).application_name("forebay").extra_float_digits(None))
}

fn describe(error: &sqlx::Error, url: &str, options: &PgConnectOptions) -> String {
    if let Some(why) = tls::describe(error, url, options) {
        return why;
    }
    match error {
        sqlx::Error::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
            format!("connection refused: nothing listens at {}:{}", options.get_host(), options.get_port())
        }
        sqlx::Error::Database(error) => {
            let message = error.message();
            match error.code().as_deref() {
                Some("28P01" | "28000") => format!("authentication failed: {message}"),
                Some("3D000") => format!("unknown database: {message}; create it with createdb"),
                _ => message.to_owned(),
            }
        }
        error => error.to_string(),
    }
}
