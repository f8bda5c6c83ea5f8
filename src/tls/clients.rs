//! Verification of client certificates: a certificate must be in `client_ca`, or be signed by one that is.
//!
//! It is separate because webpki alone does not accept the most common kind of certificate: `openssl req -x509` marks
//! the certificate that it creates as an authority's, and webpki refuses such a certificate from a client. Forebay's
//! client accepts such a certificate from a service in the same way.

use std::sync::Arc;

use forebay_client::is_named_authority;
use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, UnixTime},
    server::{
        VerifierBuilderError, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

/// Verifies that a certificate is signed by one of the named certificates, or is one of them.
#[derive(Debug)]
pub(super) struct NamedClients {
    named: Vec<CertificateDer<'static>>,
    webpki: Arc<dyn ClientCertVerifier>,
}

impl NamedClients {
    pub(super) fn new(
        named: Vec<CertificateDer<'static>>,
        roots: RootCertStore,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        let webpki = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
        Ok(Self { named, webpki })
    }
}

impl ClientCertVerifier for NamedClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.webpki.root_hint_subjects()
    }

    /// webpki checks the validity period before it complains that a certificate is an authority's, and the signature of
    /// the handshake proves that the client has the private key. A named certificate needs no further checks: the owner
    /// of its key could sign any other certificate with it.
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match self.webpki.verify_client_cert(end_entity, intermediates, now) {
            Err(error) if is_named_authority(&error, end_entity, &self.named) => Ok(ClientCertVerified::assertion()),
            outcome => outcome,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.webpki.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.webpki.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.webpki.supported_verify_schemes()
    }
}
