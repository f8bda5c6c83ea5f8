use std::{
    collections::BTreeSet,
    io::Read as _,
    path::{Path, PathBuf},
};

use axum::http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, VARY,
};

use super::*;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../console")
}

/// The paths of all files below a folder, relative to `console/`.
fn files_below(path: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(path).expect("the folder can be read") {
        let path = entry.expect("the folder can be read").path();
        if path.is_dir() {
            files_below(&path, found);
        } else {
            let name = path.strip_prefix(folder()).expect("it is below").to_str().expect("names are text");
            found.insert(name.to_owned());
        }
    }
}

fn all_files() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    files_below(&folder(), &mut found);
    found
}

/// What only the type checker of `make test ONLY=console` reads.
fn is_for_the_checker(path: &str) -> bool {
    path.ends_with(".d.ts") || ["package.json", "package-lock.json", "tsconfig.json"].contains(&path)
}

fn headers_of<const N: usize>(sent: [(header::HeaderName, &str); N]) -> HeaderMap {
    sent.into_iter().map(|(name, value)| (name, value.parse().expect("it is a header"))).collect()
}

#[test]
fn the_table_has_every_file_of_the_folder_and_no_other() {
    let listed: BTreeSet<String> = FILES.iter().map(|file| file.0.to_owned()).collect();
    assert_eq!(listed.len(), FILES.len(), "a file is listed twice");
    let served: BTreeSet<String> = all_files().into_iter().filter(|path| !is_for_the_checker(path)).collect();
    assert_eq!(listed, served);
}

#[test]
fn media_types_follow_the_names_of_files() {
    for &(path, media, _) in FILES {
        let expected = match Path::new(path).extension().and_then(|extension| extension.to_str()) {
            Some("html") => HTML,
            Some("css") => STYLE,
            Some("js") => SCRIPT,
            Some("svg") => IMAGE,
            _ => TEXT,
        };
        assert_eq!(media, expected, "{path}");
    }
}

#[tokio::test]
async fn the_page_has_a_policy_of_its_own() {
    let response = page(HeaderMap::new()).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()[CONTENT_TYPE], HTML);
    let policy = response.headers()[CONTENT_SECURITY_POLICY].to_str().expect("it is text");
    assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self';"), "{policy}");
    assert!(policy.ends_with("require-trusted-types-for 'script'; trusted-types lit-html"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
}

#[tokio::test]
async fn an_unchanged_file_is_not_sent_again() {
    let path = || Ok(axum::extract::Path("app.js".to_owned()));
    let first = file(path(), HeaderMap::new()).await.expect("the file is there");
    assert_eq!(first.headers()[CACHE_CONTROL], "no-cache");
    let tag = first.headers()[ETAG].to_str().expect("it is text").to_owned();
    let strong = tag.strip_prefix("W/").expect("the tag is weak").to_owned();
    for known in [tag.clone(), strong, format!("\"other\", {tag}"), "*".to_owned()] {
        let again = file(path(), headers_of([(IF_NONE_MATCH, &known)])).await.expect("the file is there");
        assert_eq!(again.status(), StatusCode::NOT_MODIFIED, "{known}");
        assert_eq!(again.headers()[ETAG], tag.as_str());
        assert_eq!(again.headers()[CACHE_CONTROL], "no-cache");
    }
    let changed = file(path(), headers_of([(IF_NONE_MATCH, "\"other\"")])).await.expect("the file is there");
    assert_eq!(changed.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_browser_that_accepts_gzip_gets_it() {
    for &(path, _, bytes) in FILES.iter().filter(|file| file.0 != PAGE) {
        let sent = |request| file(Ok(axum::extract::Path(path.to_owned())), request);
        let plain = sent(HeaderMap::new()).await.expect("the file is there");
        let gzip = sent(headers_of([(ACCEPT_ENCODING, "gzip, deflate, br")])).await.expect("the file is there");
        assert_eq!(plain.headers().get(CONTENT_ENCODING), None, "{path}");
        assert_eq!(gzip.headers()[CONTENT_ENCODING], "gzip", "{path}");
        for response in [&plain, &gzip] {
            assert_eq!(response.headers()[VARY], "accept-encoding", "{path}");
        }
        assert_eq!(plain.headers()[ETAG], gzip.headers()[ETAG], "{path}");
        let body = async |response: Response| {
            axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("the body is in memory")
        };
        let (plain, gzip) = (body(plain).await, body(gzip).await);
        let mut read = Vec::new();
        flate2::read::GzDecoder::new(&gzip[..]).read_to_end(&mut read).expect("it is gzip");
        assert_eq!((&plain[..], &read[..]), (bytes, bytes), "{path}");
    }
}

#[tokio::test]
async fn only_the_files_of_the_table_are_served() {
    for path in ["index.html", "../Cargo.toml", "nothing.js", "", "vendor"] {
        let found = file(Ok(axum::extract::Path(path.to_owned())), HeaderMap::new()).await;
        assert!(found.is_err(), "{path}");
    }
}

/// Our own scripts, styles and page: what is not a library's.
fn own_files() -> impl Iterator<Item = (&'static str, &'static str)> {
    let own = FILES.iter().filter(|file| !file.0.starts_with("vendor/"));
    own.map(|&(path, _, bytes)| (path, std::str::from_utf8(bytes).expect("our files are text")))
}

#[test]
fn our_own_files_load_nothing_from_elsewhere_and_turn_no_text_into_markup() {
    let forbidden = [
        "http:",
        "https:",
        "eval(",
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "unsafeHTML",
        "unsafeSVG",
        " style=",
        "new Function",
        "new Worker",
        "createPolicy",
        "javascript:",
    ];
    for (path, text) in own_files() {
        // A name, which nothing loads.
        let text = text.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
        for (number, line) in text.lines().enumerate() {
            let found = forbidden.iter().find(|word| line.contains(**word));
            assert!(found.is_none(), "console/{path}:{}: {} in `{line}`", number + 1, found.unwrap_or(&""));
            assert!(line.chars().count() <= 120, "console/{path}:{}: longer than 120 characters", number + 1);
        }
    }
}

/// The digests of copied files, those of the tests too.
#[test]
fn vendored_files_are_those_of_their_packages() {
    let list = std::fs::read_to_string(folder().join("vendor/VENDOR.toml")).expect("it is there");
    let list: toml::Table = toml::from_str(&list).expect("it is TOML");
    let packages = list["package"].as_array().expect("it lists packages");
    let mut listed = BTreeSet::from(["vendor/VENDOR.toml".to_owned()]);
    for file in packages.iter().flat_map(|package| package["file"].as_array().expect("a package has files")) {
        let path = file["to"].as_str().expect("a path is text");
        let bytes = std::fs::read(folder().join("..").join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        let digest = ring::digest::digest(&ring::digest::SHA256, &bytes);
        let digits: Vec<String> = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let digest = digits.concat();
        assert_eq!(file["sha256"].as_str(), Some(digest.as_str()), "{path} is not the file of its package");
        listed.extend(path.strip_prefix("console/").map(str::to_owned));
    }
    let vendored: BTreeSet<String> = all_files().into_iter().filter(|path| path.starts_with("vendor/")).collect();
    assert_eq!(listed, vendored, "VENDOR.toml beside console/vendor");
}
