package document

import (
	"bytes"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/meander-rl/meander/schemas"
)

// channel is one kind of subject: what travels on it, who sends and who receives it. What a stream stores on another
// subject than it is published on has two: readers of the stream filter by the stored one.
type channel struct {
	name, address string
	// event is a type name; empty for the raw bytes of a part.
	event     string
	stream    string
	summary   string
	sender    string // services, separated by commas; empty where the stream makes the subject
	receivers []string
}

// channels are the subjects of the contract in the order data flows.
var channels = []channel{
	{
		"prompt", schemas.Prefix + "prompt.{run}", schemas.TypePrompt, schemas.StreamPrompts, "what users publish",
		"client",
		[]string{"intake"},
	},
	{
		"group", schemas.Prefix + "group.{run}.{uid}", schemas.TypeGroup, schemas.StreamGroups,
		"the record of one group, the claim of its uid", "intake",
		[]string{"client"},
	},
	{
		"plan", schemas.Prefix + "plan.{run}.{uid}", schemas.TypePlan, schemas.StreamGroups,
		"who rolls in a group of scheduled sampling, and from where", "intake",
		[]string{"client"},
	},
	{
		"opening_published", schemas.Prefix + "opening.{run}.{batch}.{uid}", schemas.TypeGroup, "",
		"the same record on its way to where the rewards of the group will come; the stream stores it on the subject " +
			"of the channel opening", "intake",
		[]string{"client"},
	},
	{
		"opening", schemas.Prefix + "opening.{partition}.{run}.{batch}.{uid}", schemas.TypeGroup, schemas.StreamRewards,
		"the same record, where the rewards of the group will come", "",
		[]string{"advantage", "client"},
	},
	{
		"request", schemas.Prefix + "request.{run}.{lane}.{uid}.{sample}.{stage}", schemas.TypeRequest,
		schemas.StreamRequests, "one sample to be made, fully resolved", "intake",
		[]string{"sampler"},
	},
	{
		"step", schemas.Prefix + "step.{run}.{uid}.{sample}.{stage}.{attempt}.{step}", schemas.TypeStep,
		schemas.StreamSteps, "one denoising step as it happens", "sampler",
		[]string{"client"},
	},
	{
		"part", schemas.Prefix + "step.{run}.{uid}.{sample}.{stage}.{attempt}.{step}.{part}", "", schemas.StreamSteps,
		"a part of a step's tensors that were too large for one message", "sampler",
		[]string{"client"},
	},
	{
		"tokens", schemas.Prefix + "tokens.{run}.{uid}.{sample}.{stage}.{attempt}.{n}", schemas.TypeTokens,
		schemas.StreamSteps, "tokens of a text as they are made, or given", "sampler",
		[]string{"client"},
	},
	{
		"tokens_part", schemas.Prefix + "tokens.{run}.{uid}.{sample}.{stage}.{attempt}.{n}.{part}", "",
		schemas.StreamSteps, "a part of logits that were too large for one message", "sampler",
		[]string{"client"},
	},
	{
		"trajectory", schemas.Prefix + "trajectory.{run}.{uid}.{sample}.{stage}", schemas.TypeTrajectory,
		schemas.StreamTrajectories, "the authority on one sample", "sampler",
		[]string{"reward", "client"},
	},
	{
		"verdict", schemas.Prefix + "verdict.{run}.{uid}.{sample}.{name}", schemas.TypeVerdict, schemas.StreamVerdicts,
		"a reward from outside of one sample", "client",
		[]string{"reward"},
	},
	{
		"rating", schemas.Prefix + "rating.{run}.{uid}.{reward}", schemas.TypeRating, schemas.StreamVerdicts,
		"what a reward function of one's own said of a whole group", "reward",
		[]string{"client"},
	},
	{
		"step_reward", schemas.Prefix + "step_reward.{run}.{uid}.{sample}.{step}", schemas.TypeStepReward,
		schemas.StreamVerdicts, "the score of a sample in the middle", "reward",
		[]string{"client"},
	},
	{
		"selection", schemas.Prefix + "selection.{run}.{uid}.{step}", schemas.TypeSelection, schemas.StreamVerdicts,
		"which samples of a group end at a step", "reward",
		[]string{"client"},
	},
	{
		"reward_published", schemas.Prefix + "reward.{run}.{batch}.{uid}.{sample}", schemas.TypeReward, "",
		"the score of one sample as it is published; the stream stores it on the subject of the channel reward",
		"reward",
		[]string{"client"},
	},
	{
		"reward", schemas.Prefix + "reward.{partition}.{run}.{batch}.{uid}.{sample}", schemas.TypeReward,
		schemas.StreamRewards, "the score of one sample", "",
		[]string{"advantage", "client"},
	},
	{
		"advantage", schemas.Prefix + "advantage.{run}.{uid}", schemas.TypeAdvantage, schemas.StreamAdvantages,
		"the result of one group", "advantage",
		[]string{"client"},
	},
	{
		"batch", schemas.Prefix + "batch.{run}.{batch}", schemas.TypeBatch, schemas.StreamAdvantages,
		"all groups of a batch have closed", "advantage",
		[]string{"client"},
	},
	{
		"update", schemas.Prefix + "update.{run}.{lane}.{tenant}.{trainer}.{step}", schemas.TypeUpdate,
		schemas.StreamUpdates,
		"one update that a trainer made of a lane's weights", "client",
		[]string{"client"},
	},
	{
		"alarm", schemas.Prefix + "alarm.{run}.{rule}", schemas.TypeAlarm, schemas.StreamUpdates,
		"a run breaks a rule", "intake",
		[]string{"client"},
	},
	{
		"policy", schemas.Prefix + "policy.{lane}.{tenant}", schemas.TypePolicy, schemas.StreamPolicies,
		"weights with their version, and what a lane that serves them takes", "client, sampler",
		[]string{"sampler", "intake", "client"},
	},
	{
		"applied", schemas.Prefix + "applied.{lane}.{tenant}.{instance}", schemas.TypeApplied, schemas.StreamApplied,
		"a sampler's answer to a policy: applied or refused", "sampler",
		[]string{"client"},
	},
	{
		"presence", "$KV." + schemas.PresenceBucket + ".{instance}", schemas.TypePresence, "",
		"a service that runs, with its abilities; an entry of a key-value bucket, renewed while it runs",
		"sampler, reward",
		[]string{"intake", "client"},
	},
	{
		"control", schemas.Prefix + "control.{run}", schemas.TypeControl, schemas.StreamControl,
		"what an operator asks of a run: cancel, pause, resume, status", "client",
		[]string{"intake"},
	},
	{
		"held_control", "$KV." + schemas.ControlBucket + ".{run}", schemas.TypeControl, "",
		"the control that holds of a run; an entry of a key-value bucket", "intake",
		[]string{"sampler", "reward", "advantage", "client"},
	},
	{
		"held_group_control", "$KV." + schemas.ControlBucket + ".{run}.{uid}", schemas.TypeControl, "",
		"the control that holds of one group; an entry of a key-value bucket", "intake",
		[]string{"sampler", "reward", "advantage", "client"},
	},
	{
		"parked", schemas.Prefix + "parked.{run}.{lane}.{uid}.{sample}.{stage}", schemas.TypeRequest,
		schemas.StreamParked, "a request of a paused run, out of its queue until the run is resumed", "sampler, intake",
		[]string{"intake"},
	},
	{
		"dead", schemas.Prefix + "dead.{service}.{run}.{uid}", schemas.TypeDead, schemas.StreamDead,
		"input that was refused, and why", "any service",
		[]string{"client"},
	},
	{
		"score", schemas.Prefix + "score.{name}", schemas.TypeScoreRequest, "",
		"one sample, or a whole group, for a worker of the reward function nats:NAME, queue group NAME", "reward",
		[]string{"scoring worker"},
	},
	{
		"score_reply", "", schemas.TypeScoreReply, "",
		"a worker's score, or why there is none; on the reply subject of the NATS request", "scoring worker",
		[]string{"reward"},
	},
	{
		"interact", schemas.Prefix + "interact.{name}", schemas.TypeInteractRequest, "",
		"one answer of a model for a worker of the interaction, queue group NAME", "sampler",
		[]string{"interaction worker"},
	},
	{
		"interact_reply", "", schemas.TypeInteractReply, "",
		"what the interaction says to the answer, or why it says nothing; on the reply subject of the NATS request",
		"interaction worker",
		[]string{"sampler"},
	},
	{
		"teacher", schemas.Prefix + "teacher.{name}", schemas.TypeTeacherRequest, "",
		"a stored sample whose log-probs a teacher is asked for, queue group NAME", "client",
		[]string{"teacher"},
	},
	{
		"teacher_reply", "", schemas.TypeTeacherReply, "",
		"the log-probs that the teacher gives the sample, or why it gives none; on the reply subject of the NATS " +
			"request", "teacher",
		[]string{"client"},
	},
	{
		"seen", schemas.Prefix + "seen.{lane}", "", "",
		"what the network takes a stored state of a sample for, queue group LANE; nothing is stored", "client",
		[]string{"sampler"},
	},
	{
		"seen_reply", "", "", "",
		"the prediction before that step, decoded; on the reply subject of the NATS request", "sampler",
		[]string{"client"},
	},
	{
		"dry", schemas.Prefix + "dry.{run}", schemas.TypePrompt, "",
		"a prompt of which a client asks what would become of it, queue group intake; nothing is stored", "client",
		[]string{"intake"},
	},
	{
		"receipt", "", schemas.TypeReceipt, "", "intake's answer to a client that asked for one", "intake",
		[]string{"client"},
	},
	{
		"control_receipt", "", schemas.TypeControlReceipt, "", "intake's answer to a control that asked for one",
		"intake",
		[]string{"client"},
	},
}

// bucketPrefix starts the subjects of key-value buckets.
var bucketPrefix = strings.TrimSuffix(schemas.BucketSubject("", ""), ".")

var parameters = map[string]string{
	"run":     "run id",
	"lane":    "lane: a model family and size class that one kind of sampler serves",
	"uid":     "group key",
	"sample":  "sample_index, decimal",
	"attempt": "token of one attempt at the sample, unique per delivery and sampler",
	"step":    "step_index, decimal",
	"n":       "count of the sample's events before this one, decimal",
	"part":    "part number, decimal",
	"batch":   "batch id; a group without a batch has its uid here",
	"reward":  "place of the reward function in the list of the prompt, decimal, from 0",
	"partition": fmt.Sprintf("0 to %d, a hash of the batch that the stream puts in; * for all",
		schemas.RewardPartitions-1),
	"name":     "instance of the reward function external:NAME or nats:NAME, or external",
	"stage":    "stage of the sample; main where the prompt names none",
	"tenant":   "owner of the weights; main is the one that every lane has",
	"trainer":  "the trainer that made an update, where several learn from a run",
	"rule":     "the rule that the run breaks",
	"service":  "the one that refused the input",
	"instance": "a process among others",
}

// The document, in the order AsyncAPI 3.0.0 lists its fields.
type (
	document struct {
		AsyncAPI    string               `yaml:"asyncapi"`
		Info        info                 `yaml:"info"`
		ContentType string               `yaml:"defaultContentType"`
		Servers     ordered[server]      `yaml:"servers"`
		Channels    ordered[channelDoc]  `yaml:"channels"`
		Operations  ordered[operation]   `yaml:"operations"`
		Components  components           `yaml:"components"`
		Streams     ordered[streamSetup] `yaml:"x-jetstream-streams"`
	}
	info struct {
		Title       string `yaml:"title"`
		Version     string `yaml:"version"`
		Description string `yaml:"description"`
	}
	server struct {
		Host        string            `yaml:"host"`
		Protocol    string            `yaml:"protocol"`
		Description string            `yaml:"description"`
		Variables   ordered[variable] `yaml:"variables"`
		Security    []reference       `yaml:"security"`
	}
	variable struct {
		Default     string `yaml:"default"`
		Description string `yaml:"description"`
	}
	security struct {
		Type        string `yaml:"type"`
		In          string `yaml:"in,omitempty"`
		Description string `yaml:"description"`
	}
	channelDoc struct {
		Address    *string            `yaml:"address"`
		Summary    string             `yaml:"summary"`
		Messages   ordered[reference] `yaml:"messages"`
		Parameters ordered[parameter] `yaml:"parameters,omitempty"`
		JetStream  *channelStream     `yaml:"x-jetstream,omitempty"`
	}
	parameter struct {
		Description string `yaml:"description"`
	}
	// channelStream is where a reader finds what was stored on the channel: a stream by its name, with the address
	// as the filter, or a key-value bucket, in which a key is the address without what leads to it.
	channelStream struct {
		Stream string `yaml:"stream,omitempty"`
		Bucket string `yaml:"bucket,omitempty"`
		// Guard says whether a second publish on a subject is refused.
		Guard string `yaml:"guard"`
		// Delivery says who gets a message.
		Delivery string `yaml:"delivery,omitempty"`
	}
	operation struct {
		Action   string      `yaml:"action"`
		Channel  reference   `yaml:"channel"`
		Summary  string      `yaml:"summary"`
		Messages []reference `yaml:"messages"`
		Reply    *reply      `yaml:"reply,omitempty"`
		Service  string      `yaml:"x-service"`
	}
	reply struct {
		// Address is absent where the reply goes to the reply subject of the NATS request.
		Address *replyAddress `yaml:"address,omitempty"`
		Channel reference     `yaml:"channel"`
	}
	replyAddress struct {
		Description string `yaml:"description"`
		Location    string `yaml:"location"`
	}
	components struct {
		Messages ordered[message]  `yaml:"messages"`
		Security ordered[security] `yaml:"securitySchemes"`
	}
	message struct {
		Name        string   `yaml:"name"`
		Title       string   `yaml:"title"`
		Summary     string   `yaml:"summary"`
		ContentType string   `yaml:"contentType"`
		Headers     *headers `yaml:"headers,omitempty"`
		Payload     payload  `yaml:"payload"`
	}
	headers struct {
		Type       string                `yaml:"type"`
		Properties ordered[headerSchema] `yaml:"properties"`
		Required   []string              `yaml:"required,flow"`
	}
	headerSchema struct {
		Type        string `yaml:"type"`
		Const       string `yaml:"const,omitempty"`
		Description string `yaml:"description,omitempty"`
	}
	payload struct {
		Format string    `yaml:"schemaFormat"`
		Schema yaml.Node `yaml:"schema"`
	}
	reference struct {
		Ref string `yaml:"$ref"`
	}
	streamSetup struct {
		Purpose              string     `yaml:"purpose"`
		Subjects             []string   `yaml:"subjects"`
		Retention            string     `yaml:"retention"`
		Discard              string     `yaml:"discard"`
		MaxMsgsPerSubject    int        `yaml:"max_msgs_per_subject,omitempty"`
		DiscardNewPerSubject bool       `yaml:"discard_new_per_subject,omitempty"`
		MaxMsgs              int64      `yaml:"max_msgs,omitempty"`
		MaxBytes             int64      `yaml:"max_bytes,omitempty"`
		MaxAge               string     `yaml:"max_age,omitempty"`
		DuplicateWindow      string     `yaml:"duplicate_window"`
		AllowDirect          bool       `yaml:"allow_direct"`
		Transform            *transform `yaml:"subject_transform,omitempty"`
	}
	transform struct {
		Source string `yaml:"src"`
		Dest   string `yaml:"dest"`
	}
)

// ordered is a YAML map that keeps the order in which it was filled.
type ordered[T any] []entry[T]

type entry[T any] struct {
	key   string
	value T
}

// MarshalYAML returns a mapping node with the entries in their order.
func (o ordered[T]) MarshalYAML() (any, error) {
	n := yaml.Node{Kind: yaml.MappingNode}
	for _, e := range o {
		var key, value yaml.Node
		key.SetString(e.key)
		if err := value.Encode(e.value); err != nil {
			return nil, err
		}
		n.Content = append(n.Content, &key, &value)
	}
	return &n, nil
}

func (o ordered[T]) IsZero() bool { return len(o) == 0 }

// asyncAPI returns the AsyncAPI document of all channels and streams, as YAML.
func asyncAPI() ([]byte, error) {
	doc := document{
		AsyncAPI: "3.0.0",
		Info: info{
			Title: "meander", Version: fmt.Sprintf("%d.0.0", schemas.Version),
			Description: "Events of a diffusion rollout: prompts in, denoising steps, trajectories, rewards and " +
				"advantages out. " +
				"Every event is one msgpack map on a subject of its own; the message id is the subject without \"" +
				schemas.Prefix + "\".",
		},
		ContentType: schemas.ContentType,
		Servers: ordered[server]{{"nats", server{
			Host: "{host}:{port}", Protocol: "nats",
			Description: "any NATS server with JetStream, or the one of meander up; its address and access are in " +
				"build/client.env after make up",
			Variables: ordered[variable]{
				{"host", variable{"127.0.0.1", "its name or address"}},
				{"port", variable{"4222", "its client port"}},
			},
			Security: []reference{
				{"#/components/securitySchemes/token"},
				{"#/components/securitySchemes/credentials"},
			},
		}}},
	}
	doc.Components.Security = ordered[security]{
		{"token", security{"apiKey", "password", "auth_token of NATS, where the server asks for one"}},
		{"credentials", security{
			"asymmetricEncryption", "",
			"the file of meander auth that has the key of a user, with TLS where the server has it",
		}},
	}
	for _, c := range channels {
		d := channelDoc{Summary: c.summary, Messages: ordered[reference]{{
			c.name,
			reference{"#/components/messages/" + c.name},
		}}}
		if c.address != "" {
			d.Address = &c.address
		}
		if c.stream != "" {
			d.JetStream = storedBy(c.stream)
		}
		if key, ok := strings.CutPrefix(c.address, bucketPrefix); ok {
			bucket, _, _ := strings.Cut(key, ".")
			d.JetStream = &channelStream{Bucket: bucket, Guard: "the last entry of a key holds"}
		}
		for _, p := range placeholders(c.address) {
			text, ok := parameters[p]
			if !ok {
				return nil, fmt.Errorf("channel %s: parameter %q is not described", c.name, p)
			}
			d.Parameters = append(d.Parameters, entry[parameter]{p, parameter{text}})
		}
		doc.Channels = append(doc.Channels, entry[channelDoc]{c.name, d})
		doc.Operations = append(doc.Operations, operations(c)...)
		doc.Components.Messages = append(doc.Components.Messages, entry[message]{c.name, messageOf(c)})
	}
	for _, s := range schemas.Streams() {
		doc.Streams = append(doc.Streams, entry[streamSetup]{s.Name, setup(s)})
	}
	var out bytes.Buffer
	out.WriteString("# Code generated by schemas/gen. DO NOT EDIT.\n")
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := enc.Encode(doc); err != nil {
		return nil, fmt.Errorf("encode asyncapi: %w", err)
	}
	if err := enc.Close(); err != nil {
		return nil, fmt.Errorf("encode asyncapi: %w", err)
	}
	return out.Bytes(), nil
}

// placeholders returns the names in braces in an address, in order.
func placeholders(address string) []string {
	var names []string
	for token := range strings.SplitSeq(address, ".") {
		if name, ok := strings.CutPrefix(token, "{"); ok {
			names = append(names, strings.TrimSuffix(name, "}"))
		}
	}
	return names
}

// operations returns the operations of a channel: send for each sender, receive for each receiver.
func operations(c channel) []entry[operation] {
	one := func(service, action string) entry[operation] {
		o := operation{
			Action: action, Channel: reference{"#/channels/" + c.name}, Summary: c.summary, Service: service,
			Messages: []reference{{"#/channels/" + c.name + "/messages/" + c.name}},
		}
		switch {
		case c.event == schemas.TypePrompt && action == "receive":
			o.Reply = &reply{
				Address: &replyAddress{
					"the inbox of a client that wants a receipt; its first token begins with _INBOX",
					"$message.header#/" + schemas.HeaderReply,
				},
				Channel: reference{"#/channels/receipt"},
			}
		case c.name == "control" && action == "receive":
			o.Reply = &reply{
				Address: &replyAddress{
					"the inbox of a client that wants an answer; its first token begins with _INBOX",
					"$message.header#/" + schemas.HeaderReply,
				},
				Channel: reference{"#/channels/control_receipt"},
			}
		case c.name == "seen":
			o.Reply = &reply{Channel: reference{"#/channels/seen_reply"}}
		case c.name == "dry":
			o.Reply = &reply{Channel: reference{"#/channels/receipt"}}
		case c.event == schemas.TypeScoreRequest:
			o.Reply = &reply{Channel: reference{"#/channels/score_reply"}}
		case c.event == schemas.TypeInteractRequest:
			o.Reply = &reply{Channel: reference{"#/channels/interact_reply"}}
		case c.event == schemas.TypeTeacherRequest:
			o.Reply = &reply{Channel: reference{"#/channels/teacher_reply"}}
		}
		return entry[operation]{strings.ReplaceAll(service, " ", "-") + "-" + action + "-" + c.name, o}
	}
	var list []entry[operation]
	for _, s := range strings.FieldsFunc(c.sender, func(r rune) bool { return r == ',' }) {
		list = append(list, one(strings.TrimSpace(s), "send"))
	}
	for _, r := range c.receivers {
		list = append(list, one(r, "receive"))
	}
	return list
}

// messageOf returns the message of a channel: an event with its schema, or the raw bytes of a part.
func messageOf(c channel) message {
	switch c.name {
	case "seen":
		return seenMessage(c)
	case "seen_reply":
		return seenReply(c)
	}
	if c.event == "" {
		m := rawMessage(c, "application/octet-stream", fmt.Sprintf("raw bytes, at most %d; the event's tensor says "+
			"how many parts there are and their digest", schemas.MaxPartBytes))
		m.Name, m.Title = "part", "part"
		return m
	}
	m := message{
		Name: c.event, Title: c.name, Summary: c.summary, ContentType: schemas.ContentType,
		Payload: payload{
			Format: "application/schema+json;version=draft-2020-12",
			Schema: node(reference{"./" + schemaFile(c.event)}),
		},
		Headers: &headers{
			// Receivers need nothing but the payload: any client may publish.
			Type: "object", Required: []string{},
			Properties: ordered[headerSchema]{
				{schemas.HeaderType, headerSchema{Type: "string", Const: c.event}},
				{schemas.HeaderContentType, headerSchema{Type: "string", Const: schemas.ContentType}},
				{"Nats-Msg-Id", headerSchema{
					Type:        "string",
					Description: "deduplication id: the subject without \"" + schemas.Prefix + "\"",
				}},
				{schemas.HeaderTraceparent, headerSchema{Type: "string", Description: "W3C trace context"}},
				{schemas.HeaderTraceState, headerSchema{Type: "string", Description: "W3C trace context, 512 bytes"}},
				{schemas.HeaderBaggage, headerSchema{Type: "string", Description: "W3C baggage, 8192 bytes"}},
			},
		},
	}
	if e := c.event; e == schemas.TypeTrajectory || e == schemas.TypeReward || e == schemas.TypeAdvantage {
		m.Headers.Properties = append(m.Headers.Properties,
			entry[headerSchema]{schemas.HeaderOutcome, headerSchema{
				Type:        "string",
				Description: "what became of it, for readers of headers alone; the payload decides",
			}})
	}
	for _, x := range [...][3]string{
		{schemas.HeaderLane, schemas.TypeTrajectory, "lane"},
		{schemas.HeaderSamples, schemas.TypeTrajectory, "number of samples that end with it (absent: 1)"},
		{schemas.HeaderMean, schemas.TypeAdvantage, "mean reward"},
		{schemas.HeaderSaved, schemas.TypeSelection, "saved evaluations"},
	} {
		if c.event == x[1] {
			m.Headers.Properties = append(m.Headers.Properties, entry[headerSchema]{x[0], headerSchema{
				Type: "string", Description: "its " + x[2] + ", for readers of headers alone; the payload decides",
			}})
		}
	}
	if c.event == schemas.TypePrompt {
		// The message id is the publisher's to choose.
		m.Headers.Properties[2].value.Description = "deduplication id, chosen by the publisher"
		m.Headers.Properties = append(m.Headers.Properties,
			entry[headerSchema]{schemas.HeaderReply, headerSchema{
				Type:        "string",
				Description: "inbox that wants a receipt; its first token begins with _INBOX",
			}})
	}
	return m
}
