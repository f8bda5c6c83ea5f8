//! TLS: certificates are read from files and reloaded when the files change. Client certificates can be required.
//!
//! It uses rustls with ring, which needs no C library to keep up to date and no cmake to build.

mod clients;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use rustls::{
    RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tokio_rustls::TlsAcceptor;

use self::clients::NamedClients;

/// Pause between two checks of the files. Certificates expire in days, so seconds are soon enough, and the check is
/// cheap.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// The files of the certificates and of the private key, all in PEM format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The service's certificate, followed by the intermediate certificates in order.
    pub certificate: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// Certificates of the authorities that sign client certificates, or the client certificates themselves. If this is
    /// set, a client without such a certificate is refused.
    pub client_ca: Option<PathBuf>,
}

/// Why the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file does not contain what is needed.
    #[error("{path} contains no usable {what}")]
    Empty {
        /// The file.
        path: String,
        /// What the file should contain.
        what: &'static str,
        /// The file's key in the configuration.
        key: &'static str,
    },
    /// The private key does not belong to the certificate.
    #[error("the private key in {key} does not belong to the certificate in {certificate}")]
    Mismatch {
        /// The key's file.
        key: String,
        /// The certificate's file.
        certificate: String,
    },
    /// The files cannot be used for another reason.
    #[error("the certificates cannot be used: {0}")]
    Unusable(String),
}

impl TlsError {
    /// The configuration key of the file that the error is about.
    fn key(&self) -> &'static str {
        match self {
            Self::Empty { key, .. } => key,
            Self::Mismatch { .. } => "key",
            Self::Read { .. } | Self::Unusable(_) => "certificate",
        }
    }
}

/// The certificates in use, and the files that they come from.
#[derive(Debug)]
pub struct Tls {
    files: TlsFiles,
    current: RwLock<Current>,
}

#[derive(Clone, Debug)]
struct Current {
    config: Arc<ServerConfig>,
    /// The same without client certificates.
    config_of_agents: Arc<ServerConfig>,
    /// The digest of all files together, to detect changes.
    digest: blake3::Hash,
}

/// The current contents of the files.
struct Texts {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

/// Lists everything that is wrong with the files, each with its key in the configuration.
#[must_use]
pub fn check(files: &TlsFiles) -> Vec<(&'static str, TlsError)> {
    let named =
        [("certificate", Some(&files.certificate)), ("key", Some(&files.key)), ("client_ca", files.client_ca.as_ref())];
    let unreadable: Vec<_> = named.into_iter().filter_map(|(key, path)| Some((key, read(path?).err()?))).collect();
    if !unreadable.is_empty() {
        return unreadable;
    }
    match Tls::load(files.clone()) {
        Ok(_) => Vec::new(),
        Err(error) => vec![(error.key(), error)],
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.display().to_string(), source })
}

impl Tls {
    /// Reads and checks the files.
    pub fn load(files: TlsFiles) -> Result<Self, TlsError> {
        let texts = Texts::read(&files)?;
        let current = texts.current(&files)?;
        Ok(Self { files, current: RwLock::new(current) })
    }

    /// The acceptor for the next connection.
    #[must_use]
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.current().config))
    }

    /// The acceptor for the next connection of an agent. Agents are known by the keys of their sessions, and most of them
    /// cannot present a certificate.
    #[must_use]
    pub fn acceptor_of_agents(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.current().config_of_agents))
    }

    /// Describes for the log who presents certificates.
    #[must_use]
    pub fn describe(&self) -> &'static str {
        if self.files.client_ca.is_some() { "server and clients" } else { "server" }
    }

    /// Reads the files again. Returns true if they have changed. If the new files are invalid, the old certificates
    /// stay in use.
    pub fn renew(&self) -> Result<bool, TlsError> {
        let texts = Texts::read(&self.files)?;
        if texts.digest() == self.current().digest {
            return Ok(false);
        }
        let current = texts.current(&self.files)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = current;
        Ok(true)
    }

    /// Reloads changed files until the future is dropped.
    pub async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let tls = Arc::clone(&self);
            match tokio::task::spawn_blocking(move || tls.renew()).await {
                Ok(Ok(true)) => tracing::info!("certificates renewed"),
                // This also happens when the files are read between the writes of the certificate and of the key. The
                // next check then succeeds.
                Ok(Err(error)) => {
                    tracing::warn!(error = %error, "certificate reload failed; the old certificates stay in use");
                }
                Ok(Ok(false)) | Err(_) => {}
            }
        }
    }

    fn current(&self) -> Current {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Texts {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        Ok(Self {
            certificate: read(&files.certificate)?,
            key: read(&files.key)?,
            client_ca: files.client_ca.as_deref().map(read).transpose()?,
        })
    }

    fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for text in [Some(&self.certificate), Some(&self.key), self.client_ca.as_ref()].into_iter().flatten() {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text);
        }
        hasher.finalize()
    }

    fn current(&self, files: &TlsFiles) -> Result<Current, TlsError> {
        let config = Arc::new(self.config(files, files.client_ca.as_ref())?);
        let config_of_agents = match files.client_ca {
            Some(_) => Arc::new(self.config(files, None)?),
            None => Arc::clone(&config),
        };
        Ok(Current { config, config_of_agents, digest: self.digest() })
    }

    fn config(&self, files: &TlsFiles, client_ca: Option<&PathBuf>) -> Result<ServerConfig, TlsError> {
        let unusable = |error: &dyn std::error::Error| TlsError::Unusable(error.to_string());
        let provider: Arc<CryptoProvider> = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(&error))?;
        let builder = match (&self.client_ca, client_ca) {
            (Some(text), Some(path)) => {
                let mut roots = RootCertStore::empty();
                let named = certificates(text, path, "client_ca")?;
                for certificate in &named {
                    roots.add(certificate.clone()).map_err(|error| unusable(&error))?;
                }
                let verifier = NamedClients::new(named, roots, provider).map_err(|error| unusable(&error))?;
                builder.with_client_cert_verifier(Arc::new(verifier))
            }
            _ => builder.with_no_client_auth(),
        };
        // The error of the private key is not passed on, because it might quote the key.
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|_| TlsError::Empty {
            path: files.key.display().to_string(),
            what: "private key",
            key: "key",
        })?;
        let chain = certificates(&self.certificate, &files.certificate, "certificate")?;
        let mut config = builder.with_single_cert(chain, key).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => TlsError::Mismatch {
                key: files.key.display().to_string(),
                certificate: files.certificate.display().to_string(),
            },
            error => unusable(&error),
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

fn certificates(text: &[u8], path: &Path, key: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let empty = || TlsError::Empty { path: path.display().to_string(), what: "certificate", key };
    let found: Vec<_> = CertificateDer::pem_slice_iter(text).collect::<Result<_, _>>().map_err(|_| empty())?;
    if found.is_empty() { Err(empty()) } else { Ok(found) }
}
