//! Power cuts. Every change and every sync of the database's files is recorded while clients work, and then the files
//! are made again as a power cut at any moment could have left them. The service starts on each of these images, and
//! everything that was acknowledged before the cut is there.
//!
//! A sync that has returned has put on disk what was written to the file before the sync began. Everything later is on
//! disk or not, in any order, and of a write only some of its sectors may be. Names of files are on disk once the folder
//! was synced.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

use super::{Faults, database};
use crate::support::{TestApp, endure, eventually, group, http, member, process::Service, text, with, with_image};

/// The unit in which disks write.
const SECTOR: usize = 512;

/// The length of the fixed part of a record, `struct record` in `shim.c`.
const HEAD: usize = 24;

/// What a record says.
#[derive(Debug)]
enum Event {
    Written { at: usize, bytes: Vec<u8> },
    SyncBegun,
    SyncDone,
    Truncated(usize),
    Created,
    Removed,
    RenamedTo(String),
    FolderMade,
}

/// A record. Names are relative to the folder of the database, whose own name is empty.
#[derive(Debug)]
struct Record {
    event: Event,
    thread: u32,
    file: String,
    /// Where the record ends in the recording. Clients note how long the recording is when they get an answer.
    end: u64,
}

fn parse(recording: &[u8]) -> Vec<Record> {
    let mut records = Vec::new();
    let mut rest = recording;
    while let Some((head, behind)) = rest.split_at_checked(HEAD) {
        let number = |place: usize| u32::from_ne_bytes(head[4 * place..4 * place + 4].try_into().expect("four bytes"));
        let (name, count) = (number(2) as usize, number(3) as usize);
        let at = usize::try_from(u64::from_ne_bytes(head[16..].try_into().expect("eight bytes"))).expect("a position");
        let Some((name, behind)) = behind.split_at_checked(name) else { break };
        let Some((bytes, behind)) = behind.split_at_checked(count) else { break };
        let bytes = bytes.to_vec();
        let event = match number(0) {
            1 => Event::Written { at, bytes },
            2 => Event::SyncBegun,
            3 => Event::SyncDone,
            4 => Event::Truncated(at),
            5 => Event::Created,
            6 => Event::Removed,
            7 => Event::RenamedTo(String::from_utf8(bytes).expect("names are text")),
            8 => Event::FolderMade,
            other => panic!("the shim records no event {other}"),
        };
        let file = String::from_utf8(name.to_vec()).expect("names are text");
        rest = behind;
        records.push(Record { event, thread: number(1), file, end: (recording.len() - rest.len()) as u64 });
    }
    records
}

/// Changes of which those before a sync are on disk, and the others may be.
struct Pending<C> {
    changes: VecDeque<C>,
    /// How many changes are on disk.
    synced: usize,
    /// How many changes there were when a thread began to sync.
    begun: HashMap<u32, usize>,
}

impl<C> Pending<C> {
    fn new() -> Self {
        Self { changes: VecDeque::new(), synced: 0, begun: HashMap::new() }
    }

    fn begin(&mut self, thread: u32) {
        self.begun.insert(thread, self.synced + self.changes.len());
    }

    /// The changes that are on disk now and were not before.
    fn done(&mut self, thread: u32) -> Vec<C> {
        let until = self.begun.remove(&thread).expect("a sync begins before it is done");
        let new = until.saturating_sub(self.synced);
        self.synced += new;
        self.changes.drain(..new).collect()
    }
}

/// A change of the content of a file.
enum Change {
    Write { at: usize, bytes: Vec<u8> },
    Resize(usize),
}

/// A file, whatever its name is.
struct Content {
    on_disk: Vec<u8>,
    pending: Pending<Change>,
}

/// A change of a folder.
enum Naming {
    Put(String, usize),
    Remove(String),
    Move(String, String, usize),
}

fn rename(names: &mut BTreeMap<String, usize>, naming: &Naming) {
    match naming {
        Naming::Put(name, content) => {
            names.insert(name.clone(), *content);
        }
        Naming::Remove(name) => {
            names.remove(name);
        }
        Naming::Move(from, to, content) => {
            names.remove(from);
            names.insert(to.clone(), *content);
        }
    }
}

fn write(content: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    if content.len() < end {
        content.resize(end, 0);
    }
    content[at..end].copy_from_slice(bytes);
}

/// Which of the changes that no sync has put on disk a power cut leaves there.
#[derive(Clone, Copy, Debug)]
enum Cut {
    None,
    All,
    /// The oldest ones, and some sectors of the next.
    Oldest,
    /// Any of them.
    Some,
    /// Any sectors of any of them.
    Sectors,
}

const CUTS: [Cut; 5] = [Cut::None, Cut::All, Cut::Oldest, Cut::Some, Cut::Sectors];

impl Cut {
    /// For each of so many changes, the share of its sectors that are on disk: 0, 1 or about a half.
    fn shares(self, count: usize, random: &mut StdRng) -> Vec<f64> {
        let oldest = random.random_range(0..=count);
        (0..count)
            .map(|place| match self {
                Self::None => 0.0,
                Self::All => 1.0,
                Self::Oldest if place == oldest => 0.5,
                Self::Oldest => f64::from(u8::from(place < oldest)),
                Self::Some => f64::from(u8::from(random.random_bool(0.5))),
                Self::Sectors => 0.5,
            })
            .collect()
    }
}

/// The files, as records tell them.
struct Disk {
    contents: Vec<Content>,
    /// The names that processes see.
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    /// Changes of each folder.
    namings: BTreeMap<String, Pending<Naming>>,
}

/// The content of a folder.
const FOLDER: usize = usize::MAX;

/// The name of the folder that contains a file.
fn folder_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folder, _)| folder)
}

impl Disk {
    fn new() -> Self {
        Self {
            contents: Vec::new(),
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            namings: BTreeMap::from([(String::new(), Pending::new())]),
        }
    }

    fn name(&mut self, naming: Naming) {
        rename(&mut self.names, &naming);
        let (Naming::Put(name, _) | Naming::Remove(name) | Naming::Move(_, name, _)) = &naming;
        let folder = self.namings.get_mut(folder_of(name)).expect("a folder is made before its files");
        folder.changes.push_back(naming);
    }

    fn content(&mut self, name: &str) -> &mut Content {
        let content = *self.names.get(name).unwrap_or_else(|| panic!("{name} was not created in the recording"));
        &mut self.contents[content]
    }

    fn apply(&mut self, Record { event, thread, file, .. }: Record) {
        match event {
            Event::FolderMade => {
                self.namings.insert(file.clone(), Pending::new());
                self.name(Naming::Put(file, FOLDER));
            }
            Event::Created => {
                self.contents.push(Content { on_disk: Vec::new(), pending: Pending::new() });
                self.name(Naming::Put(file, self.contents.len() - 1));
            }
            Event::Removed => self.name(Naming::Remove(file)),
            Event::RenamedTo(to) => {
                let content = self.names[&file];
                self.name(Naming::Move(file, to, content));
            }
            Event::Written { at, bytes } => {
                self.content(&file).pending.changes.push_back(Change::Write { at, bytes });
            }
            Event::Truncated(length) => self.content(&file).pending.changes.push_back(Change::Resize(length)),
            Event::SyncBegun => match self.namings.get_mut(&file) {
                Some(folder) => folder.begin(thread),
                None => self.content(&file).pending.begin(thread),
            },
            Event::SyncDone => {
                if let Some(folder) = self.namings.get_mut(&file) {
                    for naming in folder.done(thread) {
                        rename(&mut self.durable_names, &naming);
                    }
                    return;
                }
                let content = self.content(&file);
                for change in content.pending.done(thread) {
                    match change {
                        Change::Write { at, bytes } => write(&mut content.on_disk, at, &bytes),
                        Change::Resize(length) => content.on_disk.resize(length, 0),
                    }
                }
            }
        }
    }

    /// Writes the files as a power cut now could leave them.
    fn cut(&self, cut: Cut, random: &mut StdRng, folder: &Path) {
        let mut names = self.durable_names.clone();
        for namings in self.namings.values() {
            let shares = cut.shares(namings.changes.len(), random);
            for (naming, share) in namings.changes.iter().zip(shares) {
                // A name has no sectors.
                if random.random_bool(share) {
                    rename(&mut names, naming);
                }
            }
        }
        // A folder comes before the files in it.
        for (name, &content) in &names {
            let outer = folder_of(name);
            if content == FOLDER {
                fs::create_dir(folder.join(name)).expect("the image can be written");
            } else if outer.is_empty() || names.contains_key(outer) {
                let bytes = self.contents[content].cut(cut, random);
                fs::write(folder.join(name), bytes).expect("the image can be written");
            }
        }
    }
}

impl Content {
    fn cut(&self, cut: Cut, random: &mut StdRng) -> Vec<u8> {
        let mut content = self.on_disk.clone();
        for (change, share) in self.pending.changes.iter().zip(cut.shares(self.pending.changes.len(), random)) {
            match change {
                Change::Resize(length) if random.random_bool(share) => content.resize(*length, 0),
                Change::Resize(_) => {}
                Change::Write { at, bytes } => {
                    let mut at = *at;
                    let mut rest = bytes.as_slice();
                    while !rest.is_empty() {
                        let (sector, behind) = rest.split_at(rest.len().min(SECTOR - at % SECTOR));
                        if random.random_bool(share) {
                            write(&mut content, at, sector);
                        }
                        (at, rest) = (at + sector.len(), behind);
                    }
                }
            }
        }
        content
    }
}

/// What a client was told.
#[derive(Clone, Debug)]
enum Fact {
    Stored(String),
    Acked(String, i64),
    Published(i64),
}

/// Facts, each with the length of the recording when the client knew it.
#[derive(Clone)]
struct Clients {
    http: reqwest::Client,
    recording: PathBuf,
    facts: Arc<Mutex<Vec<(u64, Fact)>>>,
}

impl Clients {
    /// Makes a call. Returns nothing if the service is gone.
    async fn call(&self, url: &str, method: &str, path: &str, body: &Value) -> Option<Value> {
        let method = method.parse().expect("a method");
        let response = self.http.request(method, format!("{url}{path}")).json(body).send().await.ok()?;
        if response.status() == 204 {
            return Some(Value::Null);
        }
        assert!(response.status().is_success(), "{path}: {}", response.status());
        response.json().await.ok()
    }

    fn know(&self, facts: impl IntoIterator<Item = Fact>) {
        let length = fs::metadata(&self.recording).expect("the recording is there").len();
        let mut known = self.facts.lock().expect("no client panics");
        known.extend(facts.into_iter().map(|fact| (length, fact)));
    }

    fn count(&self) -> usize {
        self.facts.lock().expect("no client panics").len()
    }

    /// Posts bundles and single rollouts, some of them large, until the service is gone.
    async fn produce(self, url: String, lane: String, groups: usize) {
        for place in 0..groups {
            let name = format!("{lane}.{place}");
            let tokens = if place % 5 == 4 { 20_000 } else { 40 };
            let long = json!({"segments": [{
                "tokens": (0..=tokens).collect::<Vec<i64>>(), "loss_mask": vec![1; tokens as usize],
                "logprobs": vec![-0.5; tokens as usize],
            }]});
            let bundle = group(&name, &[1.0, 0.0, 0.5]);
            let bundle = bundle.as_array().expect("a bundle").iter().take(2);
            let bundle: Vec<Value> = bundle.map(|rollout| with(rollout.clone(), long.clone())).collect();
            let single = with(member(&name, 2, 0.5), json!({"group_size": 3}));
            let single = with(single, with_image(&image(&name)));
            for body in [Value::Array(bundle), Value::Array(vec![single])] {
                let Some(receipts) = self.call(&url, "POST", "/trajectories", &body).await else { return };
                let receipts = receipts.as_array().expect("a list of receipts");
                self.know(receipts.iter().map(|receipt| Fact::Stored(text(&receipt["rollout_id"]).to_owned())));
            }
        }
    }

    /// Trains batches from a step on, and saves and publishes every second step, until the service is gone.
    async fn train(self, url: String, from: i64, until: i64) -> Option<()> {
        for step in from..until {
            let lease = json!({"consumer": "trainer", "wait_ms": 60_000});
            let batch = self.call(&url, "POST", "/batches", &lease).await?;
            let id = text(&batch["batch_id"]).to_owned();
            let ack = json!({"lease": batch["lease"], "step": step});
            self.call(&url, "POST", &format!("/batches/{id}/ack"), &ack).await?;
            self.know([Fact::Acked(id, step)]);
            if step % 2 == 0 {
                self.call(&url, "POST", "/policies/default/checkpoints", &json!({"step": step})).await?;
                let version = json!({"version": step, "step": step});
                self.call(&url, "PUT", "/policies/default/version", &version).await?;
                self.know([Fact::Published(step)]);
            }
        }
        Some(())
    }
}

/// The image that a rollout of a group has.
fn image(group: &str) -> Vec<u8> {
    group.bytes().cycle().take(20_000).collect()
}

/// Groups that a producer posts in one life of the service.
const GROUPS: usize = 12;

/// Steps that the trainer makes in one life of the service.
const STEPS: i64 = 8;

/// Lives of the service while it is recorded. All but the last one end gracefully or by SIGKILL, in turn.
const LIVES: usize = 4;

/// Records the lives of a service. Returns the records and what clients knew.
async fn record(folder: &Path, payloads: &str) -> (Vec<Record>, Vec<(u64, Fact)>) {
    let faults = Faults::new(folder);
    let data = folder.join("data");
    fs::create_dir(&data).expect("the folder is new");
    let recording = folder.join("recording");
    let clients = Clients { http: http(), recording: recording.clone(), facts: Arc::default() };
    let [recorded, watched] = [recording.to_str(), data.to_str()].map(|path| path.expect("temporary paths are text"));
    let mut environment = faults.environment().to_vec();
    environment.extend([("FAULTS_RECORD", recorded), ("FAULTS_FOLDER", watched), ("FOREBAY_PAYLOADS", payloads)]);
    for life in 0..LIVES {
        let service = Service::try_start(&database(&data), &environment).await.expect("it serves");
        let url = service.url.clone();
        let rules = json!({"group": {"size": 3}, "batch": {"groups": 2}, "lease": {"ttl_s": 3600}});
        clients.call(&url, "PUT", "/policies/default", &rules).await.expect("the service answers");
        let mut tasks: Vec<_> = (0..3)
            .map(|lane| tokio::spawn(clients.clone().produce(url.clone(), format!("{life}.{lane}"), GROUPS)))
            .collect();
        let from = life as i64 * STEPS + 1;
        let training = clients.clone().train(url, from, from + STEPS);
        tasks.push(tokio::spawn(async move {
            training.await;
        }));
        let mut running = Some(service);
        if life % 2 == 1 {
            let enough = clients.count() + GROUPS;
            eventually("some posts", || async { clients.count() >= enough }).await;
            running.take().expect("it runs").kill().await;
        }
        for task in tasks {
            task.await.expect("a client only stops");
        }
        if let Some(service) = running {
            assert!(service.stop().await.success());
        }
    }
    let facts = clients.facts.lock().expect("no client panics").clone();
    (parse(&fs::read(&recording).expect("there is a recording")), facts)
}

/// Starts the service on an image, and compares it with what was acknowledged before the cut.
async fn check(folder: &Path, facts: &[&Fact]) {
    let app = TestApp::start_on(&database(folder)).await;
    let listed = app.get("/trajectories?limit=1000").await.expect(200);
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for story in listed["trajectories"].as_array().expect("a list") {
        let rollout = text(&story["rollout_id"]);
        let (group, _) = rollout.rsplit_once('-').expect("ids are group-index");
        groups.entry(group.to_owned()).or_default().push(rollout.to_owned());
    }
    let mut version = 0;
    for fact in facts {
        match fact {
            Fact::Stored(rollout) => {
                let (group, _) = rollout.rsplit_once('-').expect("ids are group-index");
                let is_stored = groups.get(group).is_some_and(|rollouts| rollouts.contains(rollout));
                assert!(is_stored, "{rollout} was acknowledged and is lost");
                if rollout.ends_with("-2") {
                    let image = image(group);
                    let got = app.http.get(format!("{}/media/{}", app.url, blake3::hash(&image))).send().await;
                    let got = got.expect("the service answers").bytes().await.expect("it is whole");
                    assert!(got == image, "the image of {rollout} is lost");
                }
            }
            Fact::Acked(batch, step) => {
                let batch = app.get(&format!("/batches/{batch}")).await.expect(200);
                assert_eq!(batch["step"], *step, "{batch}");
            }
            Fact::Published(published) => version = version.max(*published),
        }
    }
    let policy = app.get("/policies/default").await.expect(200);
    assert!(policy["version"].as_i64() >= Some(version), "{policy}");
    for (group, rollouts) in &groups {
        let bundle = [0, 1].map(|index| rollouts.contains(&format!("{group}-{index}")));
        assert_eq!(bundle[0], bundle[1], "a bundle of {group} is torn");
    }
    // The service goes on, and the doctor finds nothing.
    app.accept(group("after", &[1.0, 0.5, 0.0])).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_survives_a_power_cut_at_any_moment() {
    survives_power_cuts("database").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_into_segment_files_survives_a_power_cut_at_any_moment() {
    survives_power_cuts("segments").await;
}

async fn survives_power_cuts(payloads: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (records, facts) = record(folder.path(), payloads).await;
    let images = endure::size(60, 10_000);
    let mut random = StdRng::seed_from_u64(endure::seed());
    // A third of the cuts are before the first fact: while the files are made, names that are not on disk matter.
    let first_fact = facts.iter().map(|&(known, _)| known).min().expect("clients were told something");
    let before_facts = records.partition_point(|record| record.end < first_fact);
    let mut cuts: Vec<(usize, Cut)> = (0..images)
        .map(|image| {
            let places = if image % 3 == 0 { before_facts } else { records.len() };
            (random.random_range(0..places), CUTS[image % CUTS.len()])
        })
        .collect();
    cuts.sort_unstable_by_key(|&(place, _)| place);
    let count = records.len();
    let mut records = records.into_iter();
    let mut disk = Disk::new();
    let (mut applied, mut end, mut checked) = (0, 0, 0);
    for (place, cut) in cuts {
        for record in records.by_ref().take(place + 1 - applied) {
            end = record.end;
            disk.apply(record);
        }
        applied = place + 1;
        let image = folder.path().join("image");
        fs::create_dir(&image).expect("the image before was removed");
        disk.cut(cut, &mut random, &image);
        let known: Vec<&Fact> = facts.iter().filter(|(known, _)| *known <= end).map(|(_, fact)| fact).collect();
        eprintln!("cut {cut:?} after {applied} of {count} records, with {} facts", known.len());
        check(&image, &known).await;
        checked += known.len();
        fs::remove_dir_all(&image).expect("it can be removed");
    }
    assert!(checked > 0, "no client was told anything before a cut");
    let outcome = format!("{checked} acknowledged facts: 0 lost, 0 torn, every image starts");
    endure::report(&format!("power cuts, SQLite, payloads in {payloads}"), images, &outcome);
}
