//! Encrypted connections to the server: when they are, and errors that say what to change.
//!
//! It is separate from `probe`, because most of these errors come from rustls and from files that the URL names.

use std::{fs::File, io::ErrorKind, net::IpAddr};

use rustls::{CertificateError, Error};
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use url::Url;

/// Parameters of the URL that name files.
const FILES: [&str; 3] = ["sslrootcert", "sslcert", "sslkey"];

/// The error of sqlx for a server without TLS.
const NOT_OFFERED: &str = "server does not support TLS";

/// Leaves connections to the same machine unencrypted, unless the URL requires TLS.
///
/// Their bytes are not on a network, and TLS makes them slow: sqlx 0.9 sends each TLS record separately and does not set
/// `TCP_NODELAY`. A packet to the same machine may be larger than a record, so the second record of a statement waits for
/// the delayed acknowledgement of the first. Smaller packets of a network are acknowledged at once.
pub(super) fn unless_local(options: PgConnectOptions) -> PgConnectOptions {
    let host = options.get_host();
    let is_local = host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback());
    if is_local && matches!(options.get_ssl_mode(), PgSslMode::Prefer) {
        return options.ssl_mode(PgSslMode::Disable);
    }
    options
}

/// Why a connection cannot be encrypted. None if the error has another cause.
pub(super) fn describe(error: &sqlx::Error, url: &str, options: &PgConnectOptions) -> Option<String> {
    let server = format!("{}:{}", options.get_host(), options.get_port());
    match error {
        sqlx::Error::Tls(why) if why.to_string() == NOT_OFFERED => Some(format!(
            "{server} does not offer TLS, and sslmode in the URL requires it: switch `ssl` on in the settings of the \
             server, or use sslmode=disable if the network is trusted"
        )),
        sqlx::Error::Tls(why) | sqlx::Error::Configuration(why) => {
            Some(format!("TLS to {server} cannot be set up: {why}"))
        }
        sqlx::Error::Io(error) => match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(Error::InvalidCertificate(why)) => Some(refused(&server, why)),
            Some(why) => Some(format!("TLS to {server} failed: {why}")),
            None if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => unreadable(url),
            None => None,
        },
        sqlx::Error::Database(error) if error.message().contains("client certificate") => {
            Some(format!("{error}: name one with its key in the URL: sslcert=FILE&sslkey=FILE"))
        }
        sqlx::Error::Database(error) if error.message().ends_with("no encryption") => {
            Some(format!("{error}: encrypt the connection, with sslmode=verify-full or sslmode=require in the URL"))
        }
        _ => None,
    }
}

fn refused(server: &str, why: &CertificateError) -> String {
    let way_out = match why {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "name the file with the certificate of its authority in the URL: sslrootcert=FILE"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "use a host name in the URL that the certificate has as a subject alternative name, or sslmode=verify-ca, \
             which accepts any name"
        }
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => "give the server a certificate whose dates are right",
        // For example that of the authority itself, or one in the format of version 1.
        _ => {
            "give the server a certificate of version 3 with a subject alternative name, which an authority has signed"
        }
    };
    format!("the certificate of {server} is not accepted ({why}): {way_out}")
}

/// The first file of the URL that cannot be read. sqlx does not name it.
fn unreadable(url: &str) -> Option<String> {
    let url = Url::parse(url).ok()?;
    url.query_pairs().filter(|(name, _)| FILES.contains(&&**name)).find_map(|(name, path)| {
        let why = File::open(&*path).err()?;
        Some(format!("{name} in the URL: {path} cannot be read: {why}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_to_the_same_machine_are_encrypted_only_if_the_url_requires_it() {
        let mode = |url: &str| {
            let options: PgConnectOptions = url.parse().expect("the URL is valid");
            format!("{:?}", unless_local(options).get_ssl_mode())
        };
        for host in ["localhost", "127.0.0.1"] {
            assert_eq!(mode(&format!("postgres://me@{host}/db?sslmode=prefer")), "Disable");
            assert_eq!(mode(&format!("postgres://me@{host}/db?sslmode=require")), "Require");
        }
        assert_eq!(mode("postgres://me@db.example.com/db?sslmode=prefer"), "Prefer");
        assert_eq!(mode("postgres://me@192.0.2.1/db?sslmode=verify-full"), "VerifyFull");
    }
}
