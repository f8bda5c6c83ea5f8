//! How a client proves who it is, and whom it believes.

use std::sync::{Arc, Once};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};

use super::{ClientError, pinned::PinnedVerifier};
use crate::wire::ApiKey;

/// What a client is told besides the address.
#[derive(Clone, Default)]
pub struct ClientOptions {
    /// The key to send; none where the service needs none.
    pub key: Option<ApiKey>,
    /// Certificates (PEM) to believe instead of the system's: authorities, or the service's own certificate.
    pub ca_pem: Option<Vec<u8>>,
    /// Certificate and private key (PEM, one after the other) for a service that demands them.
    pub identity_pem: Option<Vec<u8>>,
}

impl std::fmt::Debug for ClientOptions {
    /// A private key is a secret: it never reaches a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientOptions").field("key", &self.key).finish_non_exhaustive()
    }
}

impl ClientOptions {
    /// What connections are encrypted with, where they are `encrypted`; for clients that are not [`Client`](crate::Client).
    pub fn tls(&self, encrypted: bool) -> Result<ClientConfig, ClientError> {
        let provider: Arc<CryptoProvider> = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(&error))?;
        let builder = if let Some(text) = &self.ca_pem {
            let verifier = PinnedVerifier::new(certificates(text, "the authorities")?, provider)?;
            // Dangerous is only what other verifiers may do: this one checks trust, name, validity and signatures.
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        } else if encrypted {
            let verifier = rustls_platform_verifier::Verifier::new(provider).map_err(|error| unusable(&error))?;
            // Dangerous is only what other verifiers may do: this one is the operating system's.
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        } else {
            // Not to be used, and so not worth reading the system's authorities, which a container may not even have.
            builder.with_root_certificates(RootCertStore::empty())
        };
        let Some(text) = &self.identity_pem else { return Ok(builder.with_no_client_auth()) };
        // What is wrong with a key is not said: the message might quote it.
        let key = PrivateKeyDer::from_pem_slice(text).map_err(|_| nothing_in("the identity", "private key"))?;
        builder.with_client_auth_cert(certificates(text, "the identity")?, key).map_err(|error| unusable(&error))
    }
}

/// Gives reqwest the cryptography that clients of its own making need, once per process.
///
/// [`Client`](crate::Client) needs no such thing. But in a program that links this crate, `reqwest::Client::new` does,
/// because reqwest is built here without a provider: the usual one is built from C with cmake.
pub fn install_tls_provider() {
    static ONCE: Once = Once::new();
    // Where another is installed already, that one does.
    ONCE.call_once(|| drop(ring::default_provider().install_default()));
}

fn certificates(text: &[u8], place: &str) -> Result<Vec<CertificateDer<'static>>, ClientError> {
    let nothing = || nothing_in(place, "certificate");
    let found: Vec<_> = CertificateDer::pem_slice_iter(text).collect::<Result<_, _>>().map_err(|_| nothing())?;
    if found.is_empty() { Err(nothing()) } else { Ok(found) }
}

fn nothing_in(place: &str, what: &str) -> ClientError {
    ClientError::Tls(format!("no usable {what} in the PEM text of {place}"))
}

pub(super) fn unusable(error: &dyn std::error::Error) -> ClientError {
    ClientError::Tls(error.to_string())
}
