//! How a client authenticates itself, and which certificates it trusts.

use std::{
    sync::{Arc, Once},
    time::Duration,
};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};

use super::{error::ClientError, pinned::PinnedVerifier};
use crate::wire::ApiKey;

/// How long a connection may be silent before it counts as broken, by default: twice the longest long poll of the API.
pub const SILENCE_TIMEOUT: Duration = Duration::from_mins(2);

/// Options of a client other than the address.
#[derive(Clone)]
pub struct ClientOptions {
    /// The key to send. `None` if the service needs no key.
    pub key: Option<ApiKey>,
    /// Certificates (PEM) to trust instead of the system's: certificate authorities, or the service's own certificate.
    pub ca_pem: Option<Vec<u8>>,
    /// Certificate and private key (PEM, one after the other), for a service that requires a client certificate.
    pub identity_pem: Option<Vec<u8>>,
    /// How long a connection may be silent before it counts as broken. It must be longer than any long poll.
    pub silence_timeout: Duration,
}

impl Default for ClientOptions {
    /// No key, the system's authorities, and a silence of [`SILENCE_TIMEOUT`].
    fn default() -> Self {
        Self { key: None, ca_pem: None, identity_pem: None, silence_timeout: SILENCE_TIMEOUT }
    }
}

impl std::fmt::Debug for ClientOptions {
    /// A private key is a secret, so this output never contains it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientOptions").field("key", &self.key).finish_non_exhaustive()
    }
}

impl ClientOptions {
    /// Returns the TLS configuration if the URL is `encrypted`. It is public for HTTP clients other than
    /// [`Client`](crate::Client).
    pub fn tls(&self, encrypted: bool) -> Result<ClientConfig, ClientError> {
        let provider: Arc<CryptoProvider> = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(&error))?;
        let builder = if let Some(text) = &self.ca_pem {
            let verifier = PinnedVerifier::new(certificates(text, "the authorities")?, provider)?;
            // rustls calls every custom verifier dangerous. This one checks trust, name, validity and signatures.
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        } else if encrypted {
            let verifier = rustls_platform_verifier::Verifier::new(provider).map_err(|error| unusable(&error))?;
            // rustls calls every custom verifier dangerous. This one is the operating system's.
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        } else {
            // This configuration is never used, so the system's certificate authorities are not read; a container may
            // not even have any.
            builder.with_root_certificates(RootCertStore::empty())
        };
        let Some(text) = &self.identity_pem else { return Ok(builder.with_no_client_auth()) };
        // The error does not include the cause, because the message might quote the private key.
        let key = PrivateKeyDer::from_pem_slice(text).map_err(|_| nothing_in("the identity", "private key"))?;
        builder.with_client_auth_cert(certificates(text, "the identity")?, key).map_err(|error| unusable(&error))
    }
}

/// Installs the default cryptography provider for other clients of reqwest, once per process.
///
/// [`Client`](crate::Client) does not need it. But `reqwest::Client::new` does in every program that links this crate,
/// because reqwest is built here without a provider: its usual provider is C code that is built with cmake.
pub fn install_tls_provider() {
    static ONCE: Once = Once::new();
    // If another provider is installed already, that one is used.
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
