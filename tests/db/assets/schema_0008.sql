PRAGMA application_id = 1634104691;
BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO "alembic_version" VALUES('0008');
CREATE TABLE buckets (
	id INTEGER NOT NULL, 
	fusion_id VARCHAR NOT NULL, 
	label TEXT NOT NULL, 
	ranges JSON NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (fusion_id, label), 
	FOREIGN KEY(fusion_id) REFERENCES nodes (fusion_id)
);
INSERT INTO "buckets" VALUES(1,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','s0=65..128','[[65, 128]]');
CREATE TABLE candidates (
	id INTEGER NOT NULL, 
	"key" VARCHAR NOT NULL, 
	variant TEXT NOT NULL, 
	config TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE ("key", variant, config), 
	FOREIGN KEY("key") REFERENCES decision_keys (digest)
);
INSERT INTO "candidates" VALUES(1,'be26b0bf535c88612fdf1a592295d3fa','c_generic','[["unroll",4]]');
CREATE TABLE captures (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	root TEXT NOT NULL, 
	state TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	detail TEXT NOT NULL, 
	capture_seconds FLOAT NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE daemon (
	id INTEGER NOT NULL, 
	state JSON NOT NULL, 
	heartbeat_at FLOAT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE decision_keys (
	digest VARCHAR NOT NULL, 
	fusion_id TEXT NOT NULL, 
	bucket TEXT NOT NULL, 
	device TEXT NOT NULL, 
	threads INTEGER NOT NULL, 
	versions TEXT NOT NULL, 
	PRIMARY KEY (digest)
);
INSERT INTO "decision_keys" VALUES('be26b0bf535c88612fdf1a592295d3fa','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','s0=65..128','cpu:Test CPU:2:avx512',2,'torch 2.13 codegen 1');
CREATE TABLE decisions (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	"key" VARCHAR NOT NULL, 
	run_id INTEGER, 
	ranges JSON NOT NULL, 
	variant TEXT NOT NULL, 
	config JSON NOT NULL, 
	compile_key TEXT, 
	unfused_us FLOAT NOT NULL, 
	fused_us FLOAT NOT NULL, 
	speedup FLOAT NOT NULL, 
	speedup_low FLOAT NOT NULL, 
	speedup_high FLOAT NOT NULL, 
	reason TEXT NOT NULL, 
	detail TEXT NOT NULL, 
	trials INTEGER NOT NULL, 
	tuning_seconds FLOAT NOT NULL, 
	raced_threads INTEGER DEFAULT 0 NOT NULL, 
	at FLOAT NOT NULL, 
	FOREIGN KEY("key") REFERENCES decision_keys (digest), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
INSERT INTO "decisions" VALUES(1,'be26b0bf535c88612fdf1a592295d3fa',1,'[[65, 128]]','c_generic','[["unroll", 4]]','c0ffee',30.0,20.0,1.5,1.4,1.6,'won','',12,3.5,0,1.7959438578859736919e+09);
CREATE TABLE devices (
	id INTEGER NOT NULL, 
	"key" TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	name TEXT NOT NULL, 
	cores INTEGER NOT NULL, 
	isa TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE ("key")
);
INSERT INTO "devices" VALUES(1,'cpu:Test CPU:2:avx512','cpu','Test CPU',2,'avx512');
CREATE TABLE dim_histograms (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	owner TEXT NOT NULL, 
	argument TEXT NOT NULL, 
	dim INTEGER NOT NULL, 
	counts JSON NOT NULL, 
	tail_calls INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (run_id, owner, argument, dim), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE events (
	id INTEGER NOT NULL, 
	run_id INTEGER, 
	kind TEXT NOT NULL, 
	message TEXT NOT NULL, 
	data JSON NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
INSERT INTO "events" VALUES(1,1,'fallback','an event','{}',1.79594385789387965199e+09);
CREATE TABLE fleet_marks (
	server VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (server, name)
);
CREATE TABLE kernels (
	digest VARCHAR NOT NULL, 
	source_hash TEXT NOT NULL, 
	compiler TEXT NOT NULL, 
	flags TEXT NOT NULL, 
	target TEXT NOT NULL, 
	name TEXT NOT NULL, 
	source TEXT NOT NULL, 
	binary BLOB, 
	checksum TEXT NOT NULL, 
	size_bytes INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	used_at FLOAT NOT NULL, 
	resources JSON, 
	PRIMARY KEY (digest)
);
INSERT INTO "kernels" VALUES('b982fe4d1d357f339039054beb5a48f2','void af_add_relu(void) {}','gcc 12','-O3','avx512','af_pointwise_add_relu','void af_add_relu(void) {}',X'7F454C46000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000','seal:ff2b224470881984d8cd4a23212056eafcd00a2cc277ab38b1f5fbc581dc81b4',64,1.79594385787690854075e+09,1.79594385787690854075e+09,NULL);
INSERT INTO "kernels" VALUES('1ab2f105782a58550117b611bd1e6487','def af_softmax(): ...','triton 3.7.1','{}','cuda:90','af_softmax','def af_softmax(): ...',X'6175746F667573652D747269746F6E2D310A','seal:2b65cb2fa134636e2fa91fdeed1e43f9084b24cc8b459699d627b342bfe2dba1',18,1.7959438578819248676e+09,1.7959438578819248676e+09,'{"registers": 28, "spill_bytes": 0, "shared_bytes": 128, "threads": 64}');
CREATE TABLE measurements (
	id INTEGER NOT NULL, 
	candidate_id INTEGER NOT NULL, 
	status TEXT NOT NULL, 
	symbol_values JSON NOT NULL, 
	median_us FLOAT, 
	eager_us FLOAT, 
	speedup FLOAT, 
	speedup_low FLOAT, 
	speedup_high FLOAT, 
	error_ratio FLOAT, 
	host_us FLOAT, 
	eager_host_us FLOAT, 
	compile_key TEXT, 
	compile_seconds FLOAT NOT NULL, 
	measure_seconds FLOAT NOT NULL, 
	message TEXT NOT NULL, 
	at FLOAT NOT NULL, 
	origin TEXT, 
	PRIMARY KEY (id), 
	FOREIGN KEY(candidate_id) REFERENCES candidates (id)
);
INSERT INTO "measurements" VALUES(1,1,'ok','[128]',20.0,30.0,1.5,1.4,1.6,0.9,NULL,NULL,'c0ffee',0.1,0.5,'',1.79594385787335920337e+09,NULL);
CREATE TABLE node_uses (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	bucket_id INTEGER NOT NULL, 
	calls INTEGER NOT NULL, 
	fused_calls INTEGER NOT NULL, 
	live_us FLOAT NOT NULL, 
	time_share FLOAT NOT NULL, 
	shapes JSON NOT NULL, 
	source TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (run_id, bucket_id), 
	FOREIGN KEY(run_id) REFERENCES runs (id), 
	FOREIGN KEY(bucket_id) REFERENCES buckets (id)
);
INSERT INTO "node_uses" VALUES(1,1,1,10,4,31.5,0.25,'[[[128], 10]]','train.py:7 x = relu(x + y)');
CREATE TABLE nodes (
	fusion_id VARCHAR NOT NULL, 
	label TEXT NOT NULL, 
	operations TEXT NOT NULL, 
	form JSON NOT NULL, 
	source TEXT NOT NULL, 
	first_seen_at FLOAT NOT NULL, 
	PRIMARY KEY (fusion_id)
);
INSERT INTO "nodes" VALUES('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','af_pointwise_add_relu_aaaaaa','add + relu','{"inputs": [], "outputs": [], "symbols": ["s0"], "operations": [{"target": "aten.add.Tensor"}, {"target": "aten.relu.default"}]}','train.py:7 x = relu(x + y)',1.79594385785745716101e+09);
CREATE TABLE op_shapes (
	id INTEGER NOT NULL, 
	op_id INTEGER NOT NULL, 
	shapes TEXT NOT NULL, 
	strides TEXT NOT NULL, 
	producers JSON NOT NULL, 
	calls INTEGER NOT NULL, 
	time_us FLOAT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (op_id, shapes, strides), 
	FOREIGN KEY(op_id) REFERENCES ops (id)
);
CREATE TABLE ops (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	overload TEXT NOT NULL, 
	module TEXT NOT NULL, 
	phase TEXT NOT NULL, 
	dtypes TEXT NOT NULL, 
	device TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (run_id, overload, module, phase, dtypes, device), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE proposals (
	"key" VARCHAR NOT NULL, 
	variant TEXT NOT NULL, 
	config JSON NOT NULL, 
	reason TEXT NOT NULL, 
	speedup FLOAT NOT NULL, 
	status TEXT NOT NULL, 
	message TEXT NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY ("key"), 
	FOREIGN KEY("key") REFERENCES decision_keys (digest)
);
CREATE TABLE refusals (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	code TEXT NOT NULL, 
	accepted BOOLEAN NOT NULL, 
	operations TEXT NOT NULL, 
	detail TEXT NOT NULL, 
	bytes_saved INTEGER NOT NULL, 
	source TEXT NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE request_runs (
	"key" VARCHAR NOT NULL, 
	run_id INTEGER NOT NULL, 
	calls INTEGER NOT NULL, 
	shapes JSON NOT NULL, 
	PRIMARY KEY ("key", run_id), 
	FOREIGN KEY("key") REFERENCES requests ("key")
);
INSERT INTO "request_runs" VALUES('be26b0bf535c88612fdf1a592295d3fa',1,100,'[[[128], 100]]');
CREATE TABLE requests (
	"key" VARCHAR NOT NULL, 
	device TEXT DEFAULT '' NOT NULL, 
	versions TEXT DEFAULT '' NOT NULL, 
	bucket_id INTEGER NOT NULL, 
	calls INTEGER NOT NULL, 
	unfused_us FLOAT NOT NULL, 
	estimated_speedup FLOAT NOT NULL, 
	expected_saving_us FLOAT NOT NULL, 
	run_id INTEGER, 
	status TEXT NOT NULL, 
	pid INTEGER, 
	host TEXT NOT NULL, 
	attempts INTEGER NOT NULL, 
	lease_until FLOAT, 
	message TEXT NOT NULL, 
	created_at FLOAT NOT NULL, 
	updated_at FLOAT NOT NULL, 
	PRIMARY KEY ("key"), 
	FOREIGN KEY("key") REFERENCES decision_keys (digest), 
	FOREIGN KEY(bucket_id) REFERENCES buckets (id), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
INSERT INTO "requests" VALUES('be26b0bf535c88612fdf1a592295d3fa','cpu:Test CPU:2:avx512','torch 2.13 codegen 1',1,100,50.0,2.0,2500.0,1,'queued',NULL,'',0,NULL,'',1.79594385786825680734e+09,1.79594385787156414989e+09);
CREATE TABLE roots (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	root TEXT NOT NULL, 
	state TEXT NOT NULL, 
	record JSON NOT NULL, 
	updated_at FLOAT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (run_id, root), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE run_totals (
	run_id INTEGER NOT NULL, 
	"values" JSON NOT NULL, 
	updated_at FLOAT NOT NULL, 
	PRIMARY KEY (run_id), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
INSERT INTO "run_totals" VALUES(1,'{"steps": 4, "fused_calls": 0, "unfused_calls": 0, "observer_seconds": 0.0, "run_seconds": 0.0, "capture_seconds": 0.0, "paused_seconds": 0.0, "held_out_calls": 0, "exit_code": null}',1.79594385789526057245e+09);
CREATE TABLE runs (
	id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	command TEXT NOT NULL, 
	versions TEXT NOT NULL, 
	mode TEXT NOT NULL, 
	pid INTEGER NOT NULL, 
	settings JSON NOT NULL, 
	started_at FLOAT NOT NULL, 
	finished_at FLOAT, 
	machine TEXT DEFAULT '' NOT NULL, 
	steps_one_in INTEGER DEFAULT 1 NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(device_id) REFERENCES devices (id)
);
INSERT INTO "runs" VALUES(1,1,'train.py','torch 2.13 codegen 1','wait',4242,'{"tune": "wait"}',1.79594385785572051997e+09,1.79594385789625835417e+09,'',1);
CREATE TABLE setting_trials (
	id INTEGER NOT NULL, 
	run_id INTEGER, 
	device TEXT NOT NULL, 
	workload TEXT NOT NULL, 
	setting TEXT NOT NULL, 
	value TEXT NOT NULL, 
	baseline_us FLOAT NOT NULL, 
	with_us FLOAT NOT NULL, 
	ratio FLOAT NOT NULL, 
	low FLOAT NOT NULL, 
	high FLOAT NOT NULL, 
	decision TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE step_samples (
	id INTEGER NOT NULL, 
	series_id INTEGER NOT NULL, 
	held_out BOOLEAN NOT NULL, 
	fused_nodes INTEGER NOT NULL, 
	call_index INTEGER NOT NULL, 
	step_us FLOAT NOT NULL, 
	elements INTEGER DEFAULT 0 NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(series_id) REFERENCES step_series (id)
);
INSERT INTO "step_samples" VALUES(1,1,0,3,0,100.0,0);
INSERT INTO "step_samples" VALUES(2,1,0,3,1,101.0,0);
INSERT INTO "step_samples" VALUES(3,1,0,3,2,102.0,0);
INSERT INTO "step_samples" VALUES(4,1,1,0,3,100.0,0);
CREATE TABLE step_series (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	root TEXT NOT NULL, 
	signature TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (run_id, root, signature), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
INSERT INTO "step_series" VALUES(1,1,'Model','(4, 128)');
CREATE TABLE triton_files (
	"key" VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	data BLOB, 
	checksum TEXT NOT NULL, 
	size_bytes INTEGER NOT NULL, 
	used_at FLOAT NOT NULL, 
	PRIMARY KEY ("key", name)
);
INSERT INTO "triton_files" VALUES('KEY','af_softmax.cubin',X'7F454C4600000000000000000000000000000000000000000000000000000000000000000000000000000000','seal:82b18a2c2d1c3179af22fce040f5d9ece7751fd11bbf0c6e9ebe0c206e43af00',44,1.79594385788304305075e+09);
INSERT INTO "triton_files" VALUES('KEY','af_softmax.json',X'7B7D','seal:6f5b98aa3359cff3f5bb503790a2d6b41be7480e8360d23fa21142423cc5fb11',2,1.79594385788304305075e+09);
CREATE INDEX ix_decision_keys_fusion_id ON decision_keys (fusion_id);
CREATE INDEX ix_kernels_used_at ON kernels (used_at);
CREATE INDEX ix_triton_files_used_at ON triton_files (used_at);
CREATE INDEX ix_roots_root ON roots (root);
CREATE INDEX ix_captures_run_id ON captures (run_id);
CREATE INDEX ix_requests_queue ON requests (status, device, versions, expected_saving_us, calls);
CREATE INDEX ix_requests_lease ON requests (lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX ix_requests_bucket_id ON requests (bucket_id);
CREATE INDEX ix_requests_run_id ON requests (run_id);
CREATE UNIQUE INDEX ix_measurements_origin ON measurements (origin) WHERE origin IS NOT NULL;
CREATE INDEX ix_measurements_candidate_id ON measurements (candidate_id);
CREATE INDEX ix_decisions_key ON decisions ("key");
CREATE INDEX ix_decisions_run_id ON decisions (run_id) WHERE run_id IS NOT NULL;
CREATE INDEX ix_refusals_run_id ON refusals (run_id);
CREATE INDEX ix_events_run_id ON events (run_id);
CREATE INDEX ix_step_samples_series_id ON step_samples (series_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('decisions',1);
COMMIT;
