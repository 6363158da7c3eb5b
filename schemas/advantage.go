package schemas

// Advantage is the result of one group, stored exactly once per uid.
type Advantage struct {
	V     int64  `msgpack:"v"`
	Run   string `msgpack:"run"`
	UID   string `msgpack:"uid"`
	Batch string `msgpack:"batch"`
	// Status is complete, partial (deadline), failed (no sample was scored), stale (policy
	// versions too far apart, or mixed schedules) or filtered (zero variance).
	Status    string `msgpack:"status"`
	Error     string `msgpack:"error,omitempty"`
	GroupSize int64  `msgpack:"group_size"`
	// Members are sorted by sample_index.
	Members []Member `msgpack:"members"`
	// Mean and Std are over the scored members, or over the batch when Scale is global. Null when there is none.
	Mean *float64 `msgpack:"mean"`
	Std  *float64 `msgpack:"std"`
	// Scale is group, global or none; StdBasis is sample, expanded or population.
	Scale     string  `msgpack:"scale"`
	StdBasis  string  `msgpack:"std_basis"`
	Estimator string  `msgpack:"estimator"`
	Epsilon   float64 `msgpack:"epsilon"`
	// TrainedSteps is W: each advantage holds for all W stochastic steps of its sample.
	TrainedSteps     int64    `msgpack:"trained_steps"`
	ScheduleDigest   string   `msgpack:"schedule_digest"`
	PolicyVersionMin int64    `msgpack:"policy_version_min"`
	PolicyVersionMax int64    `msgpack:"policy_version_max"`
	Metadata         Metadata `msgpack:"metadata,omitempty"`
	// Opened is when the first reward was stored, Closed when the last one was (or the deadline), Unix nanoseconds.
	Opened int64 `msgpack:"opened"`
	Closed int64 `msgpack:"closed"`
}

// Member is one sample of a group.
type Member struct {
	SampleIndex int64 `msgpack:"sample_index"`
	// Reward and Advantage are null unless Status is scored.
	Reward    *float64 `msgpack:"reward"`
	Advantage *float64 `msgpack:"advantage"`
	// Status is scored, failed or missing.
	Status string `msgpack:"status"`
	// TrajectorySeq is the MDR_TRAJECTORIES sequence; 0 when missing.
	TrajectorySeq uint64 `msgpack:"trajectory_seq"`
}

// Batch says that all groups of an explicit batch have closed.
type Batch struct {
	V      int64  `msgpack:"v"`
	Run    string `msgpack:"run"`
	Batch  string `msgpack:"batch"`
	Groups int64  `msgpack:"groups"`
	// UIDs of the groups, sorted.
	UIDs []string `msgpack:"uids"`
	// Samples is the number of scored samples.
	Samples int64 `msgpack:"samples"`
	// Mean and Std of all scored rewards; null when there are none.
	Mean     *float64 `msgpack:"mean"`
	Std      *float64 `msgpack:"std"`
	StdBasis string   `msgpack:"std_basis"`
	// Metrics are named as verl names them, sorted by name.
	Metrics []Metric `msgpack:"metrics"`
	Closed  int64    `msgpack:"closed"`
}

// Metric is one number with its name.
type Metric struct {
	Name  string  `msgpack:"name"`
	Value float64 `msgpack:"value"`
}
