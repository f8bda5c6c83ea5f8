// Types that the modules of the page share. They exist only for the type checker (`make test ONLY=console`).
//
// What the service answers is not written here: `scripts/test-console` makes target/console/api.d.ts of
// openapi/forebay.json, and the types of paths, queries and answers below are taken from it.

type Paths = import("../target/console/api").paths;
type Documented = import("../target/console/api").components["schemas"];

/**
 * A body as the service sends it: a member that may be null is there. The document calls such members optional, because
 * clients may leave them out. (The service leaves out a few that say nothing, such as the reason of a batch: test those
 * for truth, not for null.) The document calls any JSON an object without members.
 */
type Sent<Body> = Body extends (infer Item)[]
    ? Sent<Item>[]
    : Body extends object
      ? string extends keyof Body
          ? Body[keyof Body] extends never ? unknown : { [Name in keyof Body]: Sent<Body[Name]> }
          : { [Name in keyof Body as null extends Body[Name] ? never : Name]: Sent<Body[Name]> } & {
                [Name in keyof Body as null extends Body[Name] ? Name : never]-?: Sent<Exclude<Body[Name], undefined>>;
            }
      : Body;

type Schemas = { [Name in keyof Documented]: Sent<Documented[Name]> };

type Batch = Schemas["BatchDescriptor"];
type Group = Schemas["GroupInfo"];
type Rollout = Schemas["TrajectoryStory"];
type Rules = Schemas["PolicyRules"];
type Filter = Schemas["FilterRule"];
type Step = Schemas["StepInfo"];
type TokenWindow = Schemas["TokenWindow"];
type RolloutContent = Schemas["TrajectoryContent"];
type Problem = Schemas["Problem"];

// ---- calls of the API

/** "/policies/{policy}/steps" -> `/policies/${string}/steps` */
type Pattern<Path extends string> = Path extends `${infer Before}{${string}}${infer After}`
    ? `${Before}${string}${Pattern<After>}`
    : Path;

/** The path of the OpenAPI document that an address such as `./batches/${string}` means. Another address has none. */
type PathOf<Address> = {
    [Path in keyof Paths]: `.${Pattern<Path>}` extends Address
        ? Address extends `.${Pattern<Path>}` ? Path : never
        : never;
}[keyof Paths];

type AnyAddress = { [Path in keyof Paths]: `.${Pattern<Path>}` }[keyof Paths];

type Call<Address, Method extends "get" | "post"> = Paths[PathOf<Address>][Method];

/** The names of the query. Values come from addresses that readers may write, so the service checks them. */
type Query<Address> = Call<Address, "get"> extends { parameters: { query?: infer Known } }
    ? { [Name in keyof Known]?: string | number | null }
    : never;

type Answer<Operation> = Operation extends { responses: { 200: { content: { "application/json": infer Body } } } }
    ? Sent<Body>
    : never;

interface Get {
    // One path has two answers.
    (address: "./trajectories", query: Query<"./trajectories"> & { rollout_id: string }): Promise<Rollout>;
    (address: "./trajectories", query: Query<"./trajectories">): Promise<Schemas["TrajectoryPage"]>;
    <Address extends AnyAddress>(address: Address, query?: Query<Address>): Promise<Answer<Call<Address, "get">>>;
}

type Post = <Address extends AnyAddress>(
    address: Address,
    body: Call<Address, "post"> extends { requestBody: { content: { "application/json": infer Body } } } ? Body : never,
) => Promise<Answer<Call<Address, "post">>>;

type GetRaw = <Address extends AnyAddress>(address: Address, query?: Query<Address>) => Promise<Response>;

// ---- screens

/** The parameters of an address, and those that the screens of a policy and of one thing always have. */
type Params = { [name: string]: string | undefined };
type OfPolicy = Params & { policy: string };
type OfOne = OfPolicy & { id: string };

/** What a part of an address becomes: null removes it. */
type Changes = { [name: string]: string | number | null | undefined };

/** What a screen has at hand. `data` is what it has loaded, and `local` what the reader has chosen on it. */
interface Context<Data = any, Local = any, Of extends Params = OfPolicy> {
    params: Of;
    data: Data;
    local: Local;
    me: Schemas["WhoAmI"] | null;
    /** Whether the reader wants tables instead of charts. */
    numbers: boolean;
    now(): number;
    update(changes: Partial<Local>): void;
    get: Get;
    post: Post;
    getRaw: GetRaw;
    go(changes: Changes, options?: { replace?: boolean }): void;
    refresh(): Promise<void>;
}

/** A context of any screen. */
type AnyContext = Context<any, any, any>;

/** The data of a screen is an object: the page takes null for data that has not come yet. */
interface View<Data extends object = any, Local = any, Of extends Params = OfPolicy> {
    title(context: Context<Data | null, Local, Of>): string;
    load(context: Context<Data | null, Local, Of>): Promise<Data>;
    render(context: Context<Data, Local, Of>): unknown;
    /** A screen that changes under the reader's eyes. */
    live?: boolean;
    /** What to tell the reader of a screen that does not: whether there is news. */
    peek?(context: Context<Data, Local, Of>): Promise<string>;
    /** Whether two addresses are the same thing, so that the reader's choices stay. */
    isSame?(before: Of, after: Of): boolean;
    local?(params: Of): Local;
    keys?: Key<Context<Data | null, Local, Of>>[];
}

interface Key<Of = AnyContext> {
    key: string;
    help: string;
    run(context: Of): void;
}

/** A column of a table. One with a `value` can be sorted. */
interface Column<Row> {
    title: string;
    cell(row: Row): unknown;
    number?: boolean;
    kind?: string;
    value?(row: Row): number | null | undefined;
}

/** The order of a table: the index of a column, and 1 or -1. */
interface Sort {
    by: number;
    direction: number;
}

interface DataTable<Row> {
    caption: string;
    columns: Column<Row>[];
    rows: Row[];
    /** The key of a row, so that a poll moves rows and does not rewrite them. */
    key(row: Row): unknown;
    rowClass?(row: Row): string;
    sort?: Sort | null;
    onSort?: ((sort: Sort) => void) | null;
}

/** A field above a list: the parameter of the address, its label, and the values to choose from if they are known. */
interface ListFilter {
    name: string;
    label: string;
    options?: string[];
}

/** An event of an element with a listener of its own: which element that is, the template knows and not the type. */
type On<Target extends Element, Of extends Event = Event> = Of & { target: Target; currentTarget: Target };

// ---- the page

/** The state of the page. */
interface State {
    phase: "starting" | "login" | "open";
    /** The answer of `/whoami`. */
    me: Schemas["WhoAmI"] | null;
    /** What the login says. */
    said: string;
    isAsking: boolean;
    view: View<any, any, any> | null;
    params: Params;
    data: any;
    local: any;
    /** Why the screen has no data. */
    error: any;
    /** The service's time of the last answer. */
    loadedAt: number | null;
    /** Since when the service has not answered, in its time and on this page's clock, and how to say it. */
    failedSince: number | null;
    failedFrom: number;
    trouble: string;
    newer: string;
    numbers: boolean;
    isHelpOpen: boolean;
    interval: number;
    /** The interval before a pause. */
    resumeTo: number;
}

/** What the parts around the screens can do. */
interface Actions {
    logIn(key: string, inBrowser: boolean): Promise<void>;
    forget(): void;
    ask(id: string): void;
    why(): void;
    setInterval(interval: number): void;
    togglePause(): void;
    toggleNumbers(): void;
    toggleHelp(): void;
    closeHelp(): void;
    up(): void;
    skip(event: Event): void;
    refresh(): Promise<void>;
}

// ---- charts

type Values = (number | null)[];

interface ChartLine {
    label: string;
    values: Values;
    /** The name of a colour of the style. */
    colour: string;
    fill?: boolean;
    dash?: boolean;
}

/** What a chart shows. A spec is never changed, only replaced. */
interface ChartSpec {
    title: string;
    sentence: string;
    x: string;
    /** The x of each point, and its moment in seconds. */
    at: number[];
    times: number[];
    series: ChartLine[];
    show(value: number | null): string;
    /** The same for the axis. */
    tick?(value: number | null): string;
    /** Whether the axis has only whole numbers. */
    isWhole?: boolean;
    /** What the values of the legend are while the cursor is elsewhere. */
    note: string;
    marks?: { at: number; text: string }[];
    /** Charts with the same name have one cursor. */
    together?: string;
}

/** Moments in seconds, from and to. */
type ChartRange = [from: number, to: number];

// ---- messages

type Json = Record<string, unknown>;

/** A part of a message, whatever the producer sent. */
type Part =
    | { kind: "text" | "reasoning" | "link"; text: string }
    | { kind: "call"; name: string; id: string; text: string | null; value: unknown }
    | { kind: "image"; url: string; bytes: number }
    | { kind: "upload"; digest: string }
    | { kind: "json"; value: unknown };

interface Message {
    role: string | null;
    name: string | null;
    parts: Part[];
    /** The number of parts that are left out. */
    hidden: number;
    /** The members that have no place of their own. */
    rest: Json | undefined;
}

type ChatPage = Schemas["MessagePage"];
type ChatItem = Schemas["ContentMessage"];

interface ChatActions {
    turn(from: number | null | undefined): void;
    showMessage(index: number): void;
    showImage(digest: string): void;
}

/** What the reader has opened. */
interface ChatLocal {
    /** Characters that are shown of a text, by the key of its part. */
    lengths: Record<string, number>;
    open: Set<string>;
    /** Messages that were left out of their page, and those that are on their way. */
    messages: Map<number, ChatItem>;
    asking: Set<number>;
    /** Images that the reader wanted to see, by their digests. */
    images: Map<string, { url?: string; error?: string; isComing?: boolean }>;
}

type ChatContext = Context<any, ChatLocal, any>;

// ---- one group

interface Statistics {
    count: number;
    mean: number;
    deviation: number;
    min: number;
    max: number;
}

/** What the screens of a batch and of a step show. */
interface Contents {
    groups: Group[];
    isWhole: boolean;
    worst: Rollout[];
}

interface GroupData {
    group: Group;
    siblings: Rollout[];
    isWhole: boolean;
    /** The rules of the policy now. */
    rules: Rules | null;
    mean: number | null;
}

/** The messages of a sibling, while they come and afterwards. */
interface SiblingContent {
    isComing?: boolean;
    messages?: ChatPage | null;
    error?: unknown;
}

interface GroupLocal {
    sort: Sort | null;
    order: string;
    count: number;
    first: number;
    isTogether: boolean;
    isFolded: boolean;
    isPrefixOpen: boolean;
    contents: Map<string, SiblingContent>;
    opened: Set<string>;
}

type GroupContext = Context<GroupData, GroupLocal, any>;

// ---- policies and steps

type Overview = Schemas["OverviewPolicy"];

interface BatchData {
    batch: Batch;
    /** Null for a key that may not read them. */
    found: Contents | null;
    rules: Rules;
}

interface StepData {
    batches: Batch[];
    found: Contents | null;
}

interface StepColumns {
    note: string;
    at: number[];
    times: number[];
    trained: Values;
    all: Values;
    mean: Values;
    max: Values;
    training: Values;
    waiting: Values;
}

interface PolicyHistory {
    /** The service's time of the answers, in milliseconds. */
    at: number;
    /** The window that the address names. */
    named: string | null;
    window: string;
    hour: Schemas["PolicySeries"];
    series: Schemas["PolicySeries"];
    steps: StepColumns;
    journal: Schemas["JournalEntry"][];
    /** Batches that had been acked: with another number, the history is old. */
    acked: number;
}

interface PolicyData {
    policy: Schemas["PolicyStatus"];
    why: Schemas["PolicyWhy"];
    history: PolicyHistory | null;
    charts: ChartSpec[] | null;
    /** Whether the key may not read the history. */
    isRefused: boolean;
    evals: PolicyEvals;
}

interface PolicyLocal extends EvaluationLocal {
    range: ChartRange | null;
}

// ---- evaluation

type Suite = Schemas["SuiteEvals"];
type SuiteVersion = Schemas["EvalVersion"];
type EvalTask = Schemas["EvalTask"];

interface PolicyEvals {
    /** The service's time of the answer, in milliseconds. */
    at: number;
    suites: Suite[];
}

/** Versions that the reader has asked for: those before the version `before`. */
interface OlderVersions {
    before: number;
    versions: SuiteVersion[];
    more: boolean;
    isComing: boolean;
    /** Why they were not read. */
    said: string;
}

interface EvaluationLocal {
    /** The point of a curve at which the reader looks. */
    pointed: { suite: string; version: number } | null;
    /** By the names of suites. */
    older: Map<string, OlderVersions>;
}

type EvaluationContext = Context<PolicyData, EvaluationLocal>;

/** A point in hundredths of the box of a curve. */
interface CurvePoint {
    version: SuiteVersion;
    x: number;
    y: number;
    /** The lower and the upper bound of its interval. */
    bounds: [number, number] | null;
    /** The column of the box that is nearer to this point than to others. */
    from: number;
    width: number;
}

interface CurveOptions {
    policy: string;
    /** The version at which the reader looks. */
    pointed: number | null;
    /** The version that the screen is about. */
    here?: number | null;
    look(version: number | null): void;
}

interface CurveTick {
    at: number;
    text: string;
}

interface CurveShape {
    points: CurvePoint[];
    /** Paths of SVG. */
    line: string;
    band: string;
    across: CurveTick[];
    up: CurveTick[];
}

type TaskOutcome = "lost" | "won" | "same" | "new" | "missing";

type OfSuite = OfPolicy & { suite: string };

interface SuiteData {
    list: Schemas["EvalTaskList"];
    /** Its tasks in the order in which they are shown. */
    tasks: EvalTask[];
    /** The suite with versions around this one. */
    suite: Suite | null;
}

interface SuiteLocal {
    pointed: number | null;
    /** How many tasks are shown. */
    shown: number;
}

// ---- one rollout

/** What the address asks for. */
interface Asked {
    policy: string;
    id: string;
    segment: number;
    from: number;
    messages: number;
}

/** Why the content is not shown. */
interface Refused {
    code: "role" | "absent" | "purged" | "damaged";
    title: string;
    detail: string;
}

interface Surroundings {
    group: Group | null;
    siblings: Rollout[];
    hasMore: boolean;
    batch: Batch | null;
    session: (Schemas["SessionInfo"] & { turns: Schemas["SessionTurn"][] }) | null;
}

interface RolloutData {
    /** The content as the service sent it, and read. */
    raw: string | null;
    content: RolloutContent | null;
    refused: Refused | null;
    story: Rollout | null;
    around: Surroundings | null;
    asked: Asked;
    address: Params;
}

/** The data of a rollout that the ledger knows. */
type Shown = RolloutData & { story: Rollout; around: Surroundings };

interface RolloutLocal extends ChatLocal {
    tokenizer: (FoundTokenizer & { policy: string }) | null;
    sought: string;
    found: number;
    foundAt: number;
}

type RolloutContext = Context<RolloutData, RolloutLocal, OfOne>;

/** A moment of the story; `batch` is the id of a batch to link to. */
interface Moment {
    title: string;
    at: string | null | undefined;
    kind: "good" | "bad" | "open";
    lines: string[];
    batch?: string;
}

// ---- tokens

interface Tokenizer {
    family: "bytes" | "sentencepiece" | "wordpiece" | "words";
    pieces: Map<number, string>;
    added: Map<number, { text: string; isSpecial: boolean }>;
}

interface FoundTokenizer {
    tokenizer: Tokenizer | null;
    name: string | null;
    isPicked: boolean;
    said: string;
}

/** What an id stands for. A "part" has bytes of a character that a later token completes. */
interface TokenText {
    text: string;
    kind: "text" | "special" | "part" | "unknown";
}

/** What the colours need besides the window. */
interface TokenFacts {
    advantage: number | null | undefined;
    /** Those of the siblings. */
    advantages: number[];
    weight: number | null;
    versions: Schemas["SegmentVersions"] | null;
}

interface TokenScale {
    /** The ground of a token of the window, or null for one without a value. */
    ground(index: number): string | null;
    /** The value at the end of the scale. */
    end: number | null;
    ends: string[] | null;
    colours: string[] | null;
    /** Why there is no scale. */
    missing: string | null;
}

interface TokenCard {
    title: string;
    lines: string[];
}

interface MapParts {
    map: Schemas["TokenMap"];
    total: number;
    from: number;
    to: number;
    mode: string;
    end: number | null;
    facts: TokenFacts;
}

// ---- a draft of filters

type Judged = "as_decided" | "rules_now" | "draft";

interface OutcomeRow {
    title: string;
    /** As decided, by the rules now, by the draft. */
    values: number[];
}

/** A filter of the draft; `id` keeps its fields together when others are added, moved or removed. */
type Draft = Filter & { id: number };

type Tried = Schemas["TryResult"];

interface TryData {
    rules: Rules;
    known: Schemas["FilterNames"] | null;
}

interface TryLocal {
    /** Whether the draft has begun: as the rules are now. */
    isBegun: boolean;
    draft: Draft[];
    groups: number;
    environment: string;
    result: Tried | null;
    tried: Draft[];
    problem: unknown;
    isTrying: boolean;
    isFocused: boolean;
}

type TryContext = Context<TryData, TryLocal>;
