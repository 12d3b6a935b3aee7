//! A query node's configuration: flags and environment over a TOML file over defaults.
//!
//! [`Options`] is what anyone may say, every field optional; [`Config`] is what the node runs with, complete and
//! validated. A wrong value is refused at start with the field's name. Secrets are referenced (a file, or the
//! environment), never spelled out in the file or on the command line, and never appear in `Debug` output.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lake_client::nodes::validate_node;
use lake_client::secret::Secret;
use lake_client::warehouse::root_uri;
use serde::Deserialize;

use crate::distributed::Policy;
use crate::error::{Error, Result};
use crate::upkeep::INTERVAL;

/// What may be said about a query node. Flags win over the environment, both over the file named by `config`.
#[derive(Debug, Clone, Default, clap::Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// A TOML file with these options, named as the flags are with underscores
    #[arg(long = "config", env = "LAKE_QUERY_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// This node's name, unique in the cluster [default: query-<host>-<port>]
    #[arg(long, env = "LAKE_QUERY_ID")]
    pub id: Option<String>,
    /// What others give this node to do: query, worker, or both; it serves whoever connects to it [default: query,worker]
    #[arg(long, env = "LAKE_QUERY_ROLES", value_name = "ROLE,...", value_delimiter = ',')]
    pub roles: Option<Vec<String>>,
    /// Directory for spill files and logs [default: ./lake-query]
    #[arg(long, env = "LAKE_QUERY_DIR", value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Address to serve Flight SQL on [default: 127.0.0.1:9393]
    #[arg(long, env = "LAKE_QUERY_LISTEN", value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Address under which clients reach this node [default: the listen address]
    #[arg(long, env = "LAKE_QUERY_ADVERTISE", value_name = "HOST:PORT")]
    pub advertise: Option<String>,
    /// Address to serve the Iceberg REST catalog on [default: nowhere]
    #[arg(long, env = "LAKE_QUERY_REST_LISTEN", value_name = "HOST:PORT")]
    pub rest_listen: Option<String>,
    /// Address to serve probes and Prometheus on: /live, /ready, /metrics [default: nowhere]
    #[arg(long, env = "LAKE_QUERY_HTTP_LISTEN", value_name = "HOST:PORT")]
    pub http_listen: Option<String>,
    /// Whether the REST catalog answers reads from cached table pointers, as SQL does, not from the metadata cluster [default: false]
    #[arg(long, env = "LAKE_QUERY_REST_CACHED_READS", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub rest_cached_reads: Option<bool>,
    /// Whether the REST catalog hands a warehouse's S3 keys, those that are in a file or a variable, to clients that ask for them [default: false]
    #[arg(long, env = "LAKE_QUERY_REST_LEND_CREDENTIALS", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub rest_lend_credentials: Option<bool>,
    /// How long the body of a request to the REST catalog may take to come, in milliseconds [default: 20000]
    #[arg(long, env = "LAKE_QUERY_REST_BODY_WITHIN_MS", value_name = "MS")]
    pub rest_body_within_ms: Option<u64>,
    /// How long the head of a request to the REST catalog may take to come, from its first byte, in milliseconds [default: 20000]
    #[arg(long, env = "LAKE_QUERY_REST_HEAD_WITHIN_MS", value_name = "MS")]
    pub rest_head_within_ms: Option<u64>,
    /// How long a connection to the REST catalog may be without a request, taking the last answer included, in seconds [default: 90]
    #[arg(long, env = "LAKE_QUERY_REST_IDLE_SECS", value_name = "SECS")]
    pub rest_idle_secs: Option<u64>,
    /// How many connections to the REST catalog are open at a time; more wait [default: 512]
    #[arg(long, env = "LAKE_QUERY_REST_MAX_CONNECTIONS", value_name = "N")]
    pub rest_max_connections: Option<usize>,
    /// The metadata peers; or a store that holds the metadata without them: etcd://HOST:PORT,.../ROOT, s3://BUCKET/PREFIX, file:///DIR
    #[arg(long, env = "LAKE_QUERY_META", value_name = "HOST:PORT,...", value_delimiter = ',')]
    pub meta: Option<Vec<String>>,
    /// Where tables live: file:///dir or s3://bucket/prefix
    #[arg(long, env = "LAKE_QUERY_WAREHOUSE", value_name = "URI")]
    pub warehouse: Option<String>,
    /// S3 endpoint, for other services than AWS
    #[arg(long, env = "LAKE_QUERY_S3_ENDPOINT", value_name = "URL")]
    pub s3_endpoint: Option<String>,
    /// S3 region [default: AWS_REGION, else us-east-1]
    #[arg(long, env = "LAKE_QUERY_S3_REGION", value_name = "REGION")]
    pub s3_region: Option<String>,
    /// Address buckets by path, not by host name [default: true with --s3-endpoint]
    #[arg(long, env = "LAKE_QUERY_S3_PATH_STYLE", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub s3_path_style: Option<bool>,
    /// File that holds the S3 access key id [default: AWS_ACCESS_KEY_ID or the instance's role]
    #[arg(long, env = "LAKE_QUERY_S3_ACCESS_KEY_FILE", value_name = "FILE")]
    pub s3_access_key_file: Option<PathBuf>,
    /// File that holds the S3 secret access key [default: AWS_SECRET_ACCESS_KEY or the instance's role]
    #[arg(long, env = "LAKE_QUERY_S3_SECRET_KEY_FILE", value_name = "FILE")]
    pub s3_secret_key_file: Option<PathBuf>,
    /// How long one request to S3 may take, what it carries and its answer included, in milliseconds [default: AWS_TIMEOUT, else 30000]
    #[arg(long, env = "LAKE_QUERY_S3_REQUEST_TIMEOUT_MS", value_name = "MS")]
    pub s3_request_timeout_ms: Option<u64>,
    /// How long making a connection to S3 may take, in milliseconds [default: AWS_CONNECT_TIMEOUT, else 5000]
    #[arg(long, env = "LAKE_QUERY_S3_CONNECT_TIMEOUT_MS", value_name = "MS")]
    pub s3_connect_timeout_ms: Option<u64>,
    /// Memory for running statements, in bytes; more spills to disk [default: half of the machine's]
    #[arg(long, env = "LAKE_QUERY_MEMORY_LIMIT_BYTES", value_name = "BYTES")]
    pub memory_limit_bytes: Option<usize>,
    /// Memory for one statement, in bytes [default: memory_limit_bytes]
    #[arg(long, env = "LAKE_QUERY_STATEMENT_MEMORY_BYTES", value_name = "BYTES")]
    pub statement_memory_bytes: Option<usize>,
    /// Room for spill files, in bytes [default: 68719476736]
    #[arg(long, env = "LAKE_QUERY_SPILL_LIMIT_BYTES", value_name = "BYTES")]
    pub spill_limit_bytes: Option<u64>,
    /// Memory for cached table metadata, delete files and footers of data files, in bytes [default: 268435456]
    #[arg(long, env = "LAKE_QUERY_METADATA_CACHE_BYTES", value_name = "BYTES")]
    pub metadata_cache_bytes: Option<u64>,
    /// How many table pointers are cached [default: 100000]
    #[arg(long, env = "LAKE_QUERY_POINTER_CACHE_ENTRIES", value_name = "N")]
    pub pointer_cache_entries: Option<u64>,
    /// Age at which a cached table pointer is looked up anew before use, in milliseconds [default: 1000]
    #[arg(long, env = "LAKE_QUERY_POINTER_TTL_MS", value_name = "MS")]
    pub pointer_ttl_ms: Option<u64>,
    /// While the metadata cluster is away, table pointers of this age are no longer used, in seconds [default: 86400]
    #[arg(long, env = "LAKE_QUERY_POINTER_STALE_SECS", value_name = "SECS")]
    pub pointer_stale_secs: Option<u64>,
    /// Longest run of a statement that reads, unless its client asks for less, in seconds [default: 600]
    #[arg(long, env = "LAKE_QUERY_READ_TIMEOUT_SECS", value_name = "SECS")]
    pub read_timeout_secs: Option<u64>,
    /// Longest run of a statement that changes something, unless its client says otherwise, in seconds [default: 60]
    #[arg(long, env = "LAKE_QUERY_WRITE_TIMEOUT_SECS", value_name = "SECS")]
    pub write_timeout_secs: Option<u64>,
    /// How many statements run at a time; more wait [default: 64]
    #[arg(long, env = "LAKE_QUERY_MAX_STATEMENTS", value_name = "N")]
    pub max_statements: Option<usize>,
    /// How many statements wait for others to end; more are refused [default: 256]
    #[arg(long, env = "LAKE_QUERY_MAX_QUEUED_STATEMENTS", value_name = "N")]
    pub max_queued_statements: Option<usize>,
    /// Longest wait for others to end, in seconds [default: 30]
    #[arg(long, env = "LAKE_QUERY_MAX_QUEUE_WAIT_SECS", value_name = "SECS")]
    pub max_queue_wait_secs: Option<u64>,
    /// Most rows that a query may return [default: no limit]
    #[arg(long, env = "LAKE_QUERY_MAX_RESULT_ROWS", value_name = "N")]
    pub max_result_rows: Option<u64>,
    /// Most bytes that a query may return, as they are in memory [default: no limit]
    #[arg(long, env = "LAKE_QUERY_MAX_RESULT_BYTES", value_name = "BYTES")]
    pub max_result_bytes: Option<u64>,
    /// How many parts of one query run in parallel [default: the machine's cores]
    #[arg(long, env = "LAKE_QUERY_TARGET_PARTITIONS", value_name = "N")]
    pub target_partitions: Option<usize>,
    /// Size at which a data file is ended and the next begun, in bytes [default: 268435456]
    #[arg(long, env = "LAKE_QUERY_TARGET_FILE_BYTES", value_name = "BYTES")]
    pub target_file_bytes: Option<usize>,
    /// Statements that take as long are logged with their text, in milliseconds [default: none]
    #[arg(long, env = "LAKE_QUERY_SLOW_STATEMENT_MS", value_name = "MS")]
    pub slow_statement_ms: Option<u64>,
    /// Whether SQL may name files, the REST catalog register tables, and tables have files, local or in a bucket, outside the warehouses [default: true on a loopback address, else false]
    #[arg(long, env = "LAKE_QUERY_ALLOW_LOCAL_FILES", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub allow_local_files: Option<bool>,
    /// How often a worker looks whether the tables of its shards need upkeep, in seconds [default: 30]
    #[arg(long, env = "LAKE_QUERY_UPKEEP_INTERVAL_SECS", value_name = "SECS")]
    pub upkeep_interval_secs: Option<u64>,
    /// Which queries are spread over several query nodes: off (none), allowed (those of sessions that ask), auto (those that read enough), or on (all) [default: auto]
    #[arg(long, env = "LAKE_QUERY_DISTRIBUTE", value_name = "WHICH")]
    pub distribute: Option<String>,
    /// Queries that read as much of tables' files are spread, in bytes [default: 1073741824]
    #[arg(long, env = "LAKE_QUERY_DISTRIBUTE_ABOVE_BYTES", value_name = "BYTES")]
    pub distribute_above_bytes: Option<u64>,
    /// Most query nodes that one query is spread over [default: 16]
    #[arg(long, env = "LAKE_QUERY_DISTRIBUTE_NODES", value_name = "N")]
    pub distribute_nodes: Option<usize>,
    /// How many parts of queries that others coordinate this node has in hand; more are refused [default: 512]
    #[arg(long, env = "LAKE_QUERY_DISTRIBUTE_TASKS", value_name = "N")]
    pub distribute_tasks: Option<usize>,
    /// The query nodes to spread over, this one among them [default: those of the metadata cluster]
    #[arg(long, env = "LAKE_QUERY_DISTRIBUTE_OVER", value_name = "ADDRESS,...", value_delimiter = ',')]
    pub distribute_over: Option<Vec<String>>,
    /// File that holds the secret which callers must present
    #[arg(long, env = "LAKE_QUERY_SECRET_FILE", value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// Serve on an address that others can reach without a secret
    #[arg(long, env = "LAKE_QUERY_INSECURE_OPEN_NETWORK", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub insecure_open_network: Option<bool>,
}

/// What a query node runs with.
#[derive(Debug, Clone)]
pub struct Config {
    /// `None`: made of the host's name and the port that is bound ([`default_id`]).
    pub id: Option<String>,
    /// At least one, none twice.
    pub roles: Vec<NodeRole>,
    /// Spill files are under `<dir>/spill`.
    pub dir: PathBuf,
    /// Where Flight SQL is served; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Under which address clients are told to come; the bound one if `None`.
    pub advertise: Option<String>,
    /// Where the REST catalog is served, if it is; port 0 takes a free one.
    pub rest_listen: Option<SocketAddr>,
    /// Where probes and Prometheus are answered.
    pub http_listen: Option<SocketAddr>,
    pub rest_cached_reads: bool,
    pub rest_lend_credentials: bool,
    pub rest_body_within: Duration,
    pub rest_head_within: Duration,
    pub rest_idle: Duration,
    pub rest_max_connections: usize,
    /// Endpoints of the metadata peers (`host:port`), or where else the metadata is. The node itself is given a store; this is
    /// for who makes it.
    pub meta: Vec<String>,
    /// URI of the warehouse, without a trailing slash.
    pub warehouse: String,
    pub s3: S3Config,
    pub memory_limit_bytes: usize,
    /// At most `memory_limit_bytes`.
    pub statement_memory_bytes: usize,
    pub spill_limit_bytes: u64,
    pub metadata_cache_bytes: u64,
    pub pointer_cache_entries: u64,
    pub pointer_ttl: Duration,
    pub pointer_stale_limit: Duration,
    pub read_timeout: Duration,
    pub write_timeout: Duration,
    pub max_statements: usize,
    pub max_queued_statements: usize,
    pub max_queue_wait: Duration,
    pub max_result_rows: Option<u64>,
    pub max_result_bytes: Option<u64>,
    pub target_partitions: usize,
    pub target_file_bytes: usize,
    /// Statements that take as long are logged; `None`: none are.
    pub slow_statement: Option<Duration>,
    pub allow_local_files: bool,
    /// From one look of a worker for upkeep to the next.
    pub upkeep_interval: Duration,
    pub distribute: Policy,
    pub distribute_above_bytes: u64,
    pub distribute_nodes: usize,
    pub distribute_tasks: usize,
    /// `host:port`; none: those of the metadata cluster.
    pub distribute_over: Vec<String>,
    /// What callers must present.
    pub secret: Option<Secret>,
}

/// How to reach S3.
#[derive(Debug, Clone, Default)]
pub struct S3Config {
    pub endpoint: Option<String>,
    pub region: Option<String>,
    pub path_style: bool,
    pub access_key: Option<Credential>,
    pub secret_key: Option<Credential>,
    /// How long one request may take; `None`: as the environment says, else as long as object_store lets it.
    pub request_timeout: Option<Duration>,
    /// The same of making a connection.
    pub connect_timeout: Option<Duration>,
}

/// A key of the object store, which no output shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential(String);

impl Credential {
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value, for handing on only.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Reads the first line of `path`.
    pub(crate) fn from_file(field: &str, path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::invalid(format!("{field}: reading {}: {e}", path.display())))?;
        let value = text.lines().next().unwrap_or_default().trim();
        if value.is_empty() {
            return Err(Error::invalid(format!("{field}: {} is empty", path.display())));
        }
        Ok(Self(value.to_owned()))
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<secret>")
    }
}

macro_rules! over {
    ($top:ident, $below:ident; $($field:ident),* $(,)?) => {
        Options { $($field: $top.$field.or($below.$field)),* }
    };
}

impl Options {
    /// These options, and where they say nothing, those of `below`.
    pub fn over(self, below: Options) -> Options {
        let top = self;
        over!(top, below;
            config, id, roles, dir, listen, advertise, rest_listen, http_listen, rest_cached_reads, rest_lend_credentials,
            rest_body_within_ms, rest_head_within_ms, rest_idle_secs, rest_max_connections,
            meta, warehouse, s3_endpoint, s3_region, s3_path_style, s3_access_key_file, s3_secret_key_file, s3_request_timeout_ms, s3_connect_timeout_ms,
            memory_limit_bytes, statement_memory_bytes,
            spill_limit_bytes, metadata_cache_bytes, pointer_cache_entries,
            pointer_ttl_ms, pointer_stale_secs, read_timeout_secs, write_timeout_secs, max_statements, max_queued_statements,
            max_queue_wait_secs, max_result_rows, max_result_bytes, target_partitions,
            target_file_bytes, slow_statement_ms, allow_local_files, upkeep_interval_secs,
            distribute, distribute_above_bytes, distribute_nodes, distribute_tasks, distribute_over, secret_file, insecure_open_network,
        )
    }

    fn from_file(path: &Path) -> Result<Options> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::invalid(format!("reading the configuration {}: {e}", path.display())))?;
        toml::from_str(&text).map_err(|e| Error::invalid(format!("the configuration {}: {e}", path.display())))
    }
}

impl Config {
    /// The configuration that `options`, and the file they name, ask for.
    ///
    /// # Errors
    /// `Invalid`, naming the field that is wrong.
    pub fn new(options: Options) -> Result<Config> {
        let options = match &options.config {
            Some(path) => {
                let file = Options::from_file(path)?;
                options.over(file)
            }
            None => options,
        };
        let listen = options.listen.as_deref().unwrap_or("127.0.0.1:9393");
        let listen = resolve_address("listen", listen)?;
        let rest_listen =
            options.rest_listen.as_deref().map(|address| resolve_address("rest_listen", address)).transpose()?;
        let http_listen =
            options.http_listen.as_deref().map(|address| resolve_address("http_listen", address)).transpose()?;
        // What is served on `http_listen` changes nothing and shows neither names nor rows: it needs no secret.
        let reachable = [("listen", Some(listen)), ("rest_listen", rest_listen)]
            .into_iter()
            .find_map(|(field, address)| Some((field, address.filter(|address| !address.ip().is_loopback())?)));
        let secret = options
            .secret_file
            .as_deref()
            .map(Secret::from_file)
            .transpose()
            .map_err(|e| Error::invalid(format!("secret_file: {e}")))?;
        if let Some((field, address)) = reachable
            && secret.is_none()
            && options.insecure_open_network != Some(true)
        {
            return Err(Error::invalid(format!(
                "{field}: {address} can be reached from other machines, so a secret is needed: set secret_file, or say \
                 insecure_open_network = true if everyone who can reach it may read and write every table"
            )));
        }
        let rest_lend_credentials = options.rest_lend_credentials.unwrap_or(false);
        if let Some((field, address)) = reachable
            && secret.is_none()
            && rest_lend_credentials
        {
            return Err(Error::invalid(format!(
                "rest_lend_credentials: whoever reaches {field}, {address}, could have the keys: set secret_file"
            )));
        }
        let warehouse = options
            .warehouse
            .ok_or_else(|| Error::invalid("warehouse: say where tables live, as file:///dir or s3://bucket/prefix"))?;
        let memory = match options.memory_limit_bytes {
            Some(bytes) => at_least("memory_limit_bytes", bytes, 64 << 20)?,
            None => half_of_memory(),
        };
        let path_style = options.s3_path_style.unwrap_or(options.s3_endpoint.is_some());
        Ok(Config {
            id: options.id.map(node_id).transpose()?,
            roles: roles(options.roles)?,
            dir: options.dir.unwrap_or_else(|| PathBuf::from("lake-query")),
            listen,
            advertise: options.advertise,
            rest_listen,
            http_listen,
            rest_cached_reads: options.rest_cached_reads.unwrap_or(false),
            rest_lend_credentials,
            rest_body_within: Duration::from_millis(at_least(
                "rest_body_within_ms",
                options.rest_body_within_ms.unwrap_or(20_000),
                1,
            )?),
            rest_head_within: Duration::from_millis(at_least(
                "rest_head_within_ms",
                options.rest_head_within_ms.unwrap_or(20_000),
                1,
            )?),
            rest_idle: Duration::from_secs(at_least("rest_idle_secs", options.rest_idle_secs.unwrap_or(90), 1)?),
            rest_max_connections: at_least("rest_max_connections", options.rest_max_connections.unwrap_or(512), 1)?,
            meta: options.meta.unwrap_or_default(),
            warehouse: warehouse_uri(&warehouse)?,
            s3: S3Config {
                endpoint: options.s3_endpoint,
                region: options.s3_region,
                path_style,
                access_key: credential_from("s3_access_key_file", options.s3_access_key_file)?,
                secret_key: credential_from("s3_secret_key_file", options.s3_secret_key_file)?,
                request_timeout: s3_timeout("s3_request_timeout_ms", options.s3_request_timeout_ms)?,
                connect_timeout: s3_timeout("s3_connect_timeout_ms", options.s3_connect_timeout_ms)?,
            },
            memory_limit_bytes: memory,
            statement_memory_bytes: at_least(
                "statement_memory_bytes",
                options.statement_memory_bytes.unwrap_or(memory),
                1 << 20,
            )?
            .min(memory),
            spill_limit_bytes: options.spill_limit_bytes.unwrap_or(64 << 30),
            metadata_cache_bytes: options.metadata_cache_bytes.unwrap_or(256 << 20),
            pointer_cache_entries: at_least(
                "pointer_cache_entries",
                options.pointer_cache_entries.unwrap_or(100_000),
                1,
            )?,
            pointer_ttl: Duration::from_millis(options.pointer_ttl_ms.unwrap_or(1000)),
            pointer_stale_limit: Duration::from_secs(options.pointer_stale_secs.unwrap_or(24 * 3600)),
            read_timeout: Duration::from_secs(at_least(
                "read_timeout_secs",
                options.read_timeout_secs.unwrap_or(600),
                1,
            )?),
            write_timeout: Duration::from_secs(at_least(
                "write_timeout_secs",
                options.write_timeout_secs.unwrap_or(60),
                1,
            )?),
            max_statements: at_least("max_statements", options.max_statements.unwrap_or(64), 1)?,
            max_queued_statements: options.max_queued_statements.unwrap_or(256),
            max_queue_wait: Duration::from_secs(options.max_queue_wait_secs.unwrap_or(30)),
            max_result_rows: options.max_result_rows,
            max_result_bytes: options.max_result_bytes,
            target_partitions: at_least(
                "target_partitions",
                options
                    .target_partitions
                    .unwrap_or_else(|| std::thread::available_parallelism().map_or(2, |n| n.get())),
                1,
            )?,
            target_file_bytes: at_least("target_file_bytes", options.target_file_bytes.unwrap_or(256 << 20), 1 << 20)?,
            slow_statement: options.slow_statement_ms.map(Duration::from_millis),
            allow_local_files: options.allow_local_files.unwrap_or(reachable.is_none()),
            upkeep_interval: match options.upkeep_interval_secs {
                Some(secs) => Duration::from_secs(at_least("upkeep_interval_secs", secs, 1)?),
                None => INTERVAL,
            },
            distribute: match options.distribute.as_deref() {
                Some(which) => which.parse::<Policy>().map_err(|e| Error::invalid(format!("distribute: {e}")))?,
                None => Policy::default(),
            },
            distribute_above_bytes: options.distribute_above_bytes.unwrap_or(1 << 30),
            distribute_nodes: at_least("distribute_nodes", options.distribute_nodes.unwrap_or(16), 1)?,
            distribute_tasks: at_least("distribute_tasks", options.distribute_tasks.unwrap_or(512), 1)?,
            distribute_over: options.distribute_over.unwrap_or_default(),
            secret,
        })
    }
}

/// What a node is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeRole {
    /// Statements of clients.
    Query,
    /// Chores that touch objects, when the leader asks for them.
    Worker,
}

impl NodeRole {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            NodeRole::Query => "query",
            NodeRole::Worker => "worker",
        }
    }
}

fn roles(named: Option<Vec<String>>) -> Result<Vec<NodeRole>> {
    let all = [NodeRole::Query, NodeRole::Worker];
    let Some(named) = named else { return Ok(all.to_vec()) };
    if let Some(unknown) = named.iter().find(|name| all.iter().all(|role| role.as_str() != name.as_str())) {
        return Err(Error::invalid(format!("roles: {unknown:?} is no role; there are query and worker")));
    }
    let roles: Vec<NodeRole> = all.into_iter().filter(|role| named.iter().any(|name| name == role.as_str())).collect();
    match roles.is_empty() {
        true => Err(Error::invalid("roles: a node needs at least one; there are query and worker")),
        false => Ok(roles),
    }
}

fn node_id(id: String) -> Result<String> {
    validate_node(&id).map_err(|e| Error::invalid(format!("id: {e}")))?;
    Ok(id)
}

/// The name of a node that was given none, and serves on this port: another one for each host and port.
pub fn default_id(port: u16) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host: String =
        host.trim().chars().filter(|c| c.is_ascii_alphanumeric() || "-._".contains(*c)).take(64).collect();
    match host.is_empty() {
        true => format!("query-{port}"),
        false => format!("query-{host}-{port}"),
    }
}

fn credential_from(field: &str, path: Option<PathBuf>) -> Result<Option<Credential>> {
    path.map(|path| Credential::from_file(field, &path)).transpose()
}

/// What a time-out of requests to S3 may be, in milliseconds. A longer one would be longer than statements and credentials live.
const S3_TIMEOUT_MS: std::ops::RangeInclusive<u64> = 100..=300_000;

fn s3_timeout(field: &str, ms: Option<u64>) -> Result<Option<Duration>> {
    let (least, most) = S3_TIMEOUT_MS.into_inner();
    match ms {
        Some(ms) if ms > most => Err(Error::invalid(format!("{field}: {ms} is too large, the most is {most}"))),
        Some(ms) => Ok(Some(Duration::from_millis(at_least(field, ms, least)?))),
        None => Ok(None),
    }
}

fn at_least<T: PartialOrd + fmt::Display>(field: &str, value: T, least: T) -> Result<T> {
    match value < least {
        true => Err(Error::invalid(format!("{field}: {value} is too small, the least is {least}"))),
        false => Ok(value),
    }
}

fn resolve_address(field: &str, text: &str) -> Result<SocketAddr> {
    use std::net::ToSocketAddrs;
    text.to_socket_addrs()
        .map_err(|e| Error::invalid(format!("{field}: {text:?} is not an address like 127.0.0.1:9393: {e}")))?
        .next()
        .ok_or_else(|| Error::invalid(format!("{field}: {text:?} resolves to no address")))
}

/// A `file:` warehouse is made absolute; either kind loses its trailing slash.
fn warehouse_uri(text: &str) -> Result<String> {
    let wrong = |why: String| Error::invalid(format!("warehouse: {text:?} {why}"));
    if text.is_empty() || text.contains("://") {
        return root_uri(text).map_err(wrong);
    }
    let path = std::path::absolute(text).map_err(|e| wrong(e.to_string()))?;
    let path = path.to_str().ok_or_else(|| wrong("is not UTF-8".to_owned()))?;
    root_uri(&format!("file://{path}")).map_err(wrong)
}

fn half_of_memory() -> usize {
    const FALLBACK_BYTES: usize = 2 << 30;
    let total_kib = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemTotal:"))?.to_owned();
        line.split_whitespace().nth(1)?.parse::<usize>().ok()
    });
    total_kib.map_or(FALLBACK_BYTES, |kib| (kib << 10) / 2).max(64 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options { warehouse: Some("file:///w/".into()), ..Options::default() }
    }

    #[test]
    fn defaults_are_safe() {
        let config = Config::new(options()).unwrap();
        assert!(config.listen.ip().is_loopback() && config.allow_local_files && config.secret.is_none());
        assert_eq!(config.warehouse, "file:///w");
        assert_eq!(config.roles, [NodeRole::Query, NodeRole::Worker]);
        assert!(default_id(9393).starts_with("query-") && default_id(9393).ends_with("-9393"));
        assert!(validate_node(&default_id(9393)).is_ok());
    }

    #[test]
    fn an_open_address_needs_a_secret_or_the_word() {
        let open = || Options { listen: Some("0.0.0.0:0".into()), ..options() };
        let error = Config::new(open()).unwrap_err();
        assert!(error.message.contains("secret_file") && error.message.starts_with("listen:"), "{error}");
        let config = Config::new(Options { insecure_open_network: Some(true), ..open() }).unwrap();
        let lending = Options { rest_lend_credentials: Some(true), insecure_open_network: Some(true), ..open() };
        let error = Config::new(lending).unwrap_err().to_string();
        assert!(error.contains("rest_lend_credentials"), "{error}");
        assert!(!config.allow_local_files);
        let rest = Options { rest_listen: Some("0.0.0.0:0".into()), ..options() };
        let error = Config::new(rest).unwrap_err();
        assert!(error.message.starts_with("rest_listen:"), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "hunter2-hunter2-hunter2\n").unwrap();
        let config = Config::new(Options { secret_file: Some(path), ..open() }).unwrap();
        assert!(!format!("{config:?}").contains("hunter2"));
    }

    #[test]
    fn flags_win_over_the_file_and_unknown_fields_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("query.toml");
        std::fs::write(&path, "id = 'a'\nwarehouse = 's3://b/p'\nread_timeout_secs = 5\n").unwrap();
        let config =
            Config::new(Options { config: Some(path.clone()), id: Some("b".into()), ..Options::default() }).unwrap();
        assert_eq!((config.id.as_deref().unwrap(), config.warehouse.as_str()), ("b", "s3://b/p"));
        assert_eq!(config.read_timeout, Duration::from_secs(5));
        std::fs::write(&path, "wharehouse = 's3://b/p'\n").unwrap();
        let error = Config::new(Options { config: Some(path), ..Options::default() }).unwrap_err();
        assert!(error.message.contains("wharehouse"), "{error}");
    }

    #[test]
    fn wrong_values_name_their_field() {
        for (wrong, field) in [
            (Options { warehouse: Some("hdfs://x/y".into()), ..options() }, "warehouse"),
            (Options { warehouse: Some("file://host/y".into()), ..options() }, "warehouse"),
            (Options { warehouse: None, ..options() }, "warehouse"),
            (Options { listen: Some("nonsense".into()), ..options() }, "listen"),
            (Options { max_statements: Some(0), ..options() }, "max_statements"),
            (Options { statement_memory_bytes: Some(5), ..options() }, "statement_memory_bytes"),
            (Options { rest_max_connections: Some(0), ..options() }, "rest_max_connections"),
            (Options { rest_head_within_ms: Some(0), ..options() }, "rest_head_within_ms"),
            (Options { rest_idle_secs: Some(0), ..options() }, "rest_idle_secs"),
            (Options { s3_request_timeout_ms: Some(99), ..options() }, "s3_request_timeout_ms"),
            (Options { s3_connect_timeout_ms: Some(300_001), ..options() }, "s3_connect_timeout_ms"),
            (Options { id: Some("a/b".into()), ..options() }, "id"),
            (Options { roles: Some(vec!["query".into(), "leader".into()]), ..options() }, "roles"),
            (Options { secret_file: Some("/does/not/exist".into()), ..options() }, "secret_file"),
        ] {
            let error = Config::new(wrong).unwrap_err();
            assert!(error.message.starts_with(field), "{error}");
        }
    }
}
