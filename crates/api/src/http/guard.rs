//! Access control: decides from a request's head, before its body is read, whether the request is served.
//!
//! There are three checks. The checks of `Host` and `Origin` reject requests of web pages, because a browser on this
//! machine lets any page that it shows send requests to loopback. The check of the key identifies the caller, and
//! [`roles`] says what that caller may do. Permissions that depend on the policy are checked later, where the policy is
//! known: see [`Grant::check`].

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    body::HttpBody as _,
    extract::{FromRequestParts, MatchedPath, Request, State},
    http::{HeaderMap, Method, StatusCode, Uri, header, request::Parts, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};
use forebay_bounds::budget::Owner;
use forebay_domain::{access::Grant, ids::CallerId, session::SessionKey};
use forebay_service::keyring::{Denied, Keyring};

use crate::{
    Api,
    http::{body, problem::Failure, roles},
};

/// Media types that a web page may post to another origin without a preflight request.
const FORM_TYPES: [&str; 3] = ["application/x-www-form-urlencoded", "multipart/form-data", "text/plain"];

/// The shortest interval between two log lines about rejected requests, so that rejected callers cannot fill the log.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// Who may use the service.
#[derive(Clone)]
pub struct Access {
    /// The keys.
    pub keyring: Arc<Keyring>,
    /// Host names of the service, in lower case and without ports.
    pub hosts: Arc<[String]>,
}

/// What a call needs, by its method and the template of its route.
pub type RouteNeeds = fn(&Method, &str) -> roles::Needs;

/// A key that the path of a request has, for clients that cannot send headers.
#[derive(Clone)]
pub struct PathKey(pub Arc<str>);

/// The access checks of one listener.
#[derive(Clone)]
pub struct Guard {
    pub keyring: Arc<Keyring>,
    hosts: Hosts,
    needs: RouteNeeds,
    log: Arc<Mutex<RefusalLog>>,
}

impl Guard {
    pub fn new(access: Access, listen: SocketAddr) -> Self {
        let hosts = Hosts { known: access.hosts, listen };
        Self { keyring: access.keyring, hosts, needs: roles::needs, log: Arc::default() }
    }

    /// The checks of another listener of the same service, with other routes.
    #[must_use]
    pub fn of_listener(&self, listen: SocketAddr, needs: RouteNeeds) -> Self {
        let hosts = Hosts { known: Arc::clone(&self.hosts.known), listen };
        Self { keyring: Arc::clone(&self.keyring), hosts, needs, log: Arc::default() }
    }

    /// Checks a request. It returns what the caller may do, or the reason's name and the error.
    fn admit(&self, request: &Request) -> Result<Option<Grant>, (&'static str, Failure)> {
        let (headers, method) = (request.headers(), request.method());
        let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
        let needs = route.map(|route| (self.needs)(method, route));
        let host = host(request.uri(), headers);
        // Probes may use any address as the host, and their responses contain nothing secret.
        let is_probe = matches!(route, Some("/healthz" | "/readyz"));
        // Prometheus finds replicas by addresses that nobody can list. It shows a key, which a page of another host has not.
        let is_scrape = route == Some("/metrics") && self.keyring.is_required();
        if !(is_probe || is_scrape || self.hosts.accept(host.as_ref(), self.keyring.is_required())) {
            return Err(("host", wrong_host()));
        }
        if !method.is_safe() && !self.hosts.accept_origin(headers, host.as_ref()) {
            return Err(("origin", cross_origin()));
        }
        if needs == Some(roles::Needs::Nothing) {
            return Ok(None);
        }
        let grant = presented(request).and_then(|key| self.keyring.admit(key));
        let grant = grant.map_err(|denied| (denied.as_str(), unauthorized(denied)))?;
        match needs.and_then(|needs| needs.lacking(&grant)) {
            Some(why) => Err(("forbidden", forbidden(&why))),
            None => Ok(Some(grant)),
        }
    }

    fn report(&self, reason: &str) {
        let Some(silent) = self.log.lock().unwrap_or_else(PoisonError::into_inner).due(Instant::now()) else { return };
        // Neither the key nor any other text that the caller chose is logged.
        tracing::warn!(reason, unlogged = silent, "request rejected");
    }
}

/// Counts the rejections since the last one that was logged.
#[derive(Debug, Default)]
struct RefusalLog {
    logged_at: Option<Instant>,
    silent: u64,
}

impl RefusalLog {
    /// Returns the number of unlogged rejections before this one, if this one may be logged.
    fn due(&mut self, now: Instant) -> Option<u64> {
        if self.logged_at.is_some_and(|at| now.duration_since(at) < LOG_EVERY) {
            self.silent += 1;
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.silent))
    }
}

/// Passes a request on with its [`Grant`], or rejects it.
pub async fn guard(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    if presented(&request).is_ok_and(|key| api.guard.keyring.is_unknown(key))
        && let Err(error) = api.guard.keyring.catch_up().await
    {
        tracing::warn!(error = %error, "reading the keys failed; the keys read before stay in use");
    }
    match api.guard.admit(&request) {
        Ok(Some(grant)) => {
            if is_form(&request) {
                return body::form().into_response();
            }
            if let Some(key_id) = &grant.key_id {
                tracing::Span::current().record("key.id", key_id.as_str());
            }
            request.extensions_mut().insert(grant);
            next.run(request).await
        }
        Ok(None) => next.run(request).await,
        Err((reason, failure)) => {
            api.metrics.auth_failed(reason);
            api.guard.report(reason);
            turn_away(request);
            failure.into_response()
        }
    }
}

/// Reads and discards the body of a rejected request while the response is sent. If the connection were closed while
/// the client still sends, it would be reset, and the client would not receive the response.
pub fn turn_away(request: Request) {
    // A client that waits for `100 Continue` sends no body after the rejection.
    if request.headers().contains_key(header::EXPECT) || request.body().is_end_stream() {
        return;
    }
    tokio::spawn(body::discard_body(request.into_body()));
}

/// What the caller may do: the grant that [`guard`] stored. Without it, the request is rejected.
pub struct Caller(pub Grant);

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Failure> {
        parts.extensions.get().cloned().map(Self).ok_or_else(|| unauthorized(Denied::Missing))
    }
}

/// The caller that limits per key are counted for, or none if no key is needed.
pub fn caller_id(grant: &Grant) -> Option<CallerId> {
    grant.key_id.as_ref().map(|key_id| CallerId::new(key_id.as_str()))
}

/// Whose part of a budget a caller's bodies take.
pub fn owner(grant: &Grant) -> Owner {
    grant.key_id.as_ref().map_or_else(Owner::of_keyless, |key_id| Owner::new(key_id.as_str()))
}

/// The key that a request has: the one in its path, or else the one in its header.
fn presented(request: &Request) -> Result<Option<&str>, Denied> {
    match request.extensions().get::<PathKey>() {
        Some(PathKey(key)) if SessionKey::has_prefix(key) => Err(Denied::Session),
        Some(PathKey(key)) => Ok(Some(key)),
        None => bearer(request.headers()),
    }
}

/// The key in `Authorization: Bearer`, if there is one.
fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Denied> {
    let mut sent = headers.get_all(header::AUTHORIZATION).iter();
    let Some(value) = sent.next() else { return Ok(None) };
    // Two `Authorization` headers are rejected, because another reader might use the other one.
    if sent.next().is_some() {
        return Err(Denied::Invalid);
    }
    let (scheme, key) = value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or(Denied::Invalid)?;
    let key = key.trim();
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(Denied::Invalid);
    }
    // Without keys everybody may do everything here, but an agent must not end its own session.
    if SessionKey::has_prefix(key) { Err(Denied::Session) } else { Ok(Some(key)) }
}

/// The host that a request is for.
fn host(uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
    if let Some(authority) = uri.authority() {
        return Some(authority.clone());
    }
    let mut sent = headers.get_all(header::HOST).iter();
    let only = sent.next().filter(|_| sent.next().is_none())?;
    Authority::try_from(only.as_bytes()).ok()
}

/// A host name in lower case. An IPv6 address has no brackets.
fn name(authority: &Authority) -> String {
    authority.host().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase()
}

/// The host names that requests to this service may use.
#[derive(Clone)]
struct Hosts {
    known: Arc<[String]>,
    listen: SocketAddr,
}

impl Hosts {
    /// Whether a request is for this service.
    ///
    /// A web page can make its own host name resolve to 127.0.0.1, and the browser then lets it read this service's
    /// responses (DNS rebinding). Only the host name reveals this. Such a page has no key, so if keys are needed, any
    /// name is accepted unless names are configured.
    fn accept(&self, host: Option<&Authority>, key_required: bool) -> bool {
        let is_loopback = self.listen.ip().to_canonical().is_loopback();
        if self.known.is_empty() && (key_required || !is_loopback) {
            return true;
        }
        host.is_some_and(|host| self.names(&name(host)))
    }

    fn names(&self, host: &str) -> bool {
        let address = host.parse::<IpAddr>().map(|address| address.to_canonical()).ok();
        host == "localhost"
            || address.is_some_and(|address| address.is_loopback() || address == self.listen.ip().to_canonical())
            || self.known.iter().any(|known| known == host)
    }

    /// Whether a change may be made: the request must not come from a web page of another origin.
    fn accept_origin(&self, headers: &HeaderMap, host: Option<&Authority>) -> bool {
        let Some(origin) = headers.get(header::ORIGIN) else { return true };
        let origin = origin.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
        // `null`, the origin of pages that hide theirs, is rejected here.
        let Some((origin, scheme)) = origin.as_ref().and_then(|uri| Some((uri.authority()?, uri.scheme_str()?))) else {
            return false;
        };
        let default = if scheme == "https" { 443 } else { 80 };
        let port = |authority: &Authority| authority.port_u16().unwrap_or(default);
        let same = |host: &Authority| name(origin) == name(host) && port(origin) == port(host);
        // A proxy may have replaced the host name by which the page was loaded, so configured names are accepted as
        // well.
        host.is_some_and(same) || self.known.contains(&name(origin))
    }
}

/// Whether a request has a body that a web page could have posted as a form, even an empty one.
fn is_form(request: &Request) -> bool {
    let sent = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media = sent.split(';').next().unwrap_or_default().trim();
    *request.method() != Method::GET && FORM_TYPES.iter().any(|form| media.eq_ignore_ascii_case(form))
}

fn unauthorized(denied: Denied) -> Failure {
    let detail = match denied {
        Denied::Missing => "send a key: `Authorization: Bearer fb_...`",
        Denied::Invalid => "the key is unknown to this service, or it was revoked",
        Denied::Expired => "the key has expired",
        Denied::Session => {
            "the key of a session opens only the calls of its agent, at the address of `sessions.listen`"
        }
    };
    Failure::new(StatusCode::UNAUTHORIZED, "unauthorized", "A valid key is needed").detail(detail)
}

fn forbidden(why: &str) -> Failure {
    Failure::new(StatusCode::FORBIDDEN, "forbidden", "The key does not allow this").detail(why)
}

fn wrong_host() -> Failure {
    Failure::new(StatusCode::MISDIRECTED_REQUEST, "wrong-host", "The request is for another host")
        .detail("add this service's host names to `hosts` in `[access]`, or use 127.0.0.1")
}

fn cross_origin() -> Failure {
    Failure::new(StatusCode::FORBIDDEN, "cross-origin", "Pages of other origins must not change anything")
        .detail("`Origin` must be that of this service, or its host one of `hosts` in `[access]`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(listen: &str, known: &[&str]) -> Hosts {
        let known = known.iter().map(|&name| name.to_owned()).collect();
        Hosts { known, listen: listen.parse().expect("it is an address") }
    }

    fn accepts(hosts: &Hosts, host: &str, key_required: bool) -> bool {
        hosts.accept(Authority::try_from(host).ok().as_ref(), key_required)
    }

    #[test]
    fn on_loopback_without_keys_only_local_names_are_this_service() {
        let hosts = hosts("127.0.0.1:8080", &[]);
        for host in ["localhost", "LocalHost:8080", "127.0.0.1:8080", "[::1]:8080", "127.1.2.3"] {
            assert!(accepts(&hosts, host, false), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:8080", "10.0.0.1", ""] {
            assert!(!accepts(&hosts, host, false), "{host}");
            assert!(accepts(&hosts, host, true), "{host}: a page has no key");
        }
    }

    #[test]
    fn configured_names_are_the_only_ones_besides_local_ones() {
        let hosts = hosts("0.0.0.0:8080", &["forebay.example"]);
        assert!(accepts(&hosts, "Forebay.Example:443", true) && accepts(&hosts, "localhost", true));
        assert!(!accepts(&hosts, "other.example", true));
    }

    #[test]
    fn an_origin_is_that_of_the_host() {
        let hosts = hosts("127.0.0.1:8080", &["forebay.example"]);
        let accepts = |origin: &'static str, host: &'static str| {
            let headers = HeaderMap::from_iter([(header::ORIGIN, header::HeaderValue::from_static(origin))]);
            hosts.accept_origin(&headers, Some(&Authority::from_static(host)))
        };
        assert!(accepts("http://localhost:8080", "localhost:8080"));
        assert!(accepts("http://a.example", "a.example:80") && accepts("https://a.example:443", "a.example"));
        assert!(accepts("https://forebay.example", "127.0.0.1:8080"), "a proxy in front");
        for origin in ["http://localhost:3000", "http://evil.example", "null", "http://evil.example/localhost:8080"] {
            assert!(!accepts(origin, "localhost:8080"), "{origin}");
        }
    }

    #[test]
    fn refusals_are_logged_once_a_second_with_what_went_unlogged() {
        let (mut log, start) = (RefusalLog::default(), Instant::now());
        assert_eq!(log.due(start), Some(0));
        assert_eq!((log.due(start), log.due(start)), (None, None));
        assert_eq!(log.due(start + LOG_EVERY), Some(2));
    }
}
