//! Faults of the machine under the real binary: kills at every write, disks that fail, fill up or are slow, clocks that
//! jump, and flipped bits.
//!
//! `shim.c`, which the system's C compiler builds, injects the faults between the binary and libc. A memory page that
//! the test shares with the process says which faults strike and when.

mod clock;
mod disk;
mod minutes;
mod outage;
mod points;
mod power;
mod rot;

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use crate::support::process::Service;

/// Error numbers; no dependency of this crate names them.
const EIO: i64 = 5;
pub(crate) const ENOSPC: i64 = 28;
const EROFS: i64 = 30;

/// Calls that can fail.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    Sync = 1,
    Write = 2,
    Open = 3,
}

/// Files on which calls can fail.
#[derive(Clone, Copy, Debug)]
pub(crate) enum On {
    Wal = 1,
    Database = 2,
    Any = 3,
    Segment = 4,
}

/// The effect of a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    Fail(i64),
    KillBefore,
    KillAfter,
    DelayMicros(i64),
}

impl Fault {
    fn number(self) -> i64 {
        match self {
            Self::Fail(_) => 1,
            Self::KillBefore => 2,
            Self::KillAfter => 3,
            Self::DelayMicros(_) => 4,
        }
    }

    fn argument(self) -> i64 {
        match self {
            Self::Fail(argument) | Self::DelayMicros(argument) => argument,
            _ => 0,
        }
    }
}

/// The page that the test shares with the process; its fields have the same numbers as in `shim.c`.
pub(crate) struct Faults {
    page: File,
    path: PathBuf,
}

const FAULT: u64 = 0;
const CALL: u64 = 1;
const FILE: u64 = 2;
const COUNTDOWN: u64 = 3;
const LASTS: u64 = 4;
const ARGUMENT: u64 = 5;
const STRUCK: u64 = 6;
const WALL_CLOCK_OFFSET_S: u64 = 7;
const FIELDS: u64 = 8;

impl Faults {
    pub(crate) fn new(folder: &Path) -> Self {
        let path = folder.join("faults");
        let page = File::options().create(true).truncate(true).read(true).write(true).open(&path);
        let faults = Self { page: page.expect("a file can be made"), path };
        (0..FIELDS).for_each(|field| faults.set(field, 0));
        faults
    }

    fn set(&self, field: u64, value: i64) {
        self.page.write_all_at(&value.to_ne_bytes(), field * 8).expect("the page can be written");
    }

    fn get(&self, field: u64) -> i64 {
        let mut bytes = [0; 8];
        self.page.read_exact_at(&mut bytes, field * 8).expect("the page can be read");
        i64::from_ne_bytes(bytes)
    }

    /// The fault strikes once, at the `nth` call from now on.
    pub(crate) fn arm(&self, fault: Fault, call: Call, on: On, nth: i64) {
        self.arm_for(fault, call, on, nth, false);
    }

    /// The fault strikes at every call from now on.
    pub(crate) fn arm_lasting(&self, fault: Fault, call: Call, on: On) {
        self.arm_for(fault, call, on, 1, true);
    }

    fn arm_for(&self, fault: Fault, call: Call, on: On, nth: i64, lasts: bool) {
        self.disarm();
        let fields = [
            (CALL, call as i64),
            (FILE, on as i64),
            (COUNTDOWN, nth),
            (LASTS, i64::from(lasts)),
            (ARGUMENT, fault.argument()),
            (STRUCK, 0),
        ];
        for (field, value) in fields {
            self.set(field, value);
        }
        self.set(FAULT, fault.number());
    }

    pub(crate) fn disarm(&self) {
        self.set(FAULT, 0);
    }

    pub(crate) fn struck(&self) -> i64 {
        self.get(STRUCK)
    }

    fn set_wall_clock_off_by_s(&self, seconds: i64) {
        self.set(WALL_CLOCK_OFFSET_S, seconds);
    }

    /// The environment that makes a process load the shim.
    pub(crate) fn environment(&self) -> [(&'static str, &str); 3] {
        let page = self.path.to_str().expect("temporary paths are text");
        let shim = SHIM.to_str().expect("temporary paths are text");
        [("LD_PRELOAD", shim), ("FAULTS_PAGE", page), ("FAULTS_FILE", "forebay.db")]
    }

    /// Starts the service with the shim. Returns its exit status if it ended before it served.
    pub(crate) async fn start(&self, database: &str) -> Result<Service, std::process::ExitStatus> {
        Service::try_start(database, &self.environment()).await
    }
}

/// The shim, built once per run of the tests.
static SHIM: LazyLock<PathBuf> = LazyLock::new(|| {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/faults/shim.c");
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("shim-{}.so", std::process::id()));
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .args([&built, &source])
        .arg("-ldl")
        .status()
        .expect("a C compiler is there: the README asks for one");
    assert!(status.success(), "the shim does not build");
    built
});

/// The database of a test, in a folder of its own.
pub(crate) fn database(folder: &Path) -> String {
    format!("sqlite:{}", folder.join("forebay.db").display())
}
