package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/schemas"
)

// Headers and statuses of direct gets (NATS ADR-31).
const (
	headerStatus       = "Status"
	headerDescription  = "Description"
	headerNumPending   = "Nats-Num-Pending"
	headerLastSequence = "Nats-Last-Sequence"
	headerUpToSequence = "Nats-UpTo-Sequence"
	headerKVOperation  = "KV-Operation"

	statusEOB          = "204"
	statusNotFound     = "404"
	statusTooMany      = "413"
	statusNoResponders = "503"
)

type directRequest struct {
	Seq       uint64   `json:"seq,omitempty"`
	LastFor   string   `json:"last_by_subj,omitempty"`
	Batch     int      `json:"batch,omitempty"`
	MaxBytes  int      `json:"max_bytes,omitempty"`
	MultiLast []string `json:"multi_last,omitempty"`
	UpToSeq   uint64   `json:"up_to_seq,omitempty"`
	NextFor   string   `json:"next_by_subj,omitempty"`
}

// directSubject returns the subject of direct gets from a stream. Any server that has the stream answers them.
func (b *Bus) directSubject(stream string) string { return b.api + "DIRECT.GET." + stream }

// Last returns the newest message on a subject, which may have wildcards, or ErrNotFound. The subject is the one that
// is stored, which for rewards differs from the published one (RewardFilter).
func (b *Bus) Last(ctx context.Context, stream, subject string) (*Message, error) {
	from, req := b.directSubject(stream), directRequest{LastFor: subject}
	if b.clustered() {
		m, err := b.getMessage(ctx, stream, b.leaderSubject(stream), req)
		if err == nil {
			return m, nil
		}
		if !errors.Is(err, ErrPermission) {
			return nil, fmt.Errorf("last %q of %s: %w", subject, stream, err)
		}
	}
	if !strings.ContainsAny(subject, "*>") { // then the server can check whether we may read this subject
		from, req = from+"."+subject, directRequest{}
	}
	m, err := b.getMessage(ctx, stream, from, req)
	if err != nil {
		return nil, fmt.Errorf("last %q of %s: %w", subject, stream, err)
	}
	return m, nil
}

// Newest returns the newest message of a stream, or ErrNotFound.
func (b *Bus) Newest(ctx context.Context, stream string) (*Message, error) {
	return b.Last(ctx, stream, ">")
}

// Get returns the message at a sequence, or ErrNotFound.
func (b *Bus) Get(ctx context.Context, stream string, seq uint64) (*Message, error) {
	if seq == 0 {
		return nil, fmt.Errorf("get %s 0: %w", stream, ErrNotFound)
	}
	m, err := b.getMessage(ctx, stream, b.directSubject(stream), directRequest{Seq: seq})
	if errors.Is(err, ErrNotFound) && b.clustered() {
		m, err = b.getMessage(ctx, stream, b.leaderSubject(stream), directRequest{Seq: seq})
	}
	if err != nil {
		return nil, fmt.Errorf("get %s %d: %w", stream, seq, err)
	}
	return m, nil
}

// getMessage requests one message of a stream, on directSubject or leaderSubject. It returns ErrNotFound when there
// is none. While the server is away it repeats the request until ctx ends; while the server does not know the stream,
// five times.
func (b *Bus) getMessage(ctx context.Context, stream, subject string, req directRequest) (m *Message, err error) {
	var body []byte
	if req.Seq > 0 || req.LastFor != "" { // else the subject has it
		if body, err = json.Marshal(req); err != nil {
			return nil, err
		}
	}
	wait := retryMin
	for range 5 {
		answered := false
		err = b.retryWhileAway(ctx, func(ctx context.Context) error {
			resp, err := b.request(ctx, &nats.Msg{Subject: subject, Data: body})
			if err != nil {
				return err
			}
			if subject == b.leaderSubject(stream) {
				m, err = parseLeaderGet(stream, resp)
			} else if err = directError(stream, resp); err == nil {
				m, err = parseDirectGet(resp)
			}
			answered = !errors.Is(err, jetstream.ErrNoStreamResponse) && !errors.Is(err, ErrNoLeader)
			return err
		})
		if answered || classOf(err) == classFatal {
			return m, err
		}
		if pauseErr := Pause(ctx, wait); pauseErr != nil {
			return nil, errors.Join(err, pauseErr)
		}
		wait = min(2*wait, retryMax)
	}
	return nil, err
}

// directError returns the error in the server's answer to a direct get: ErrNotFound, no server, or another; nil for a
// message.
func directError(stream string, m *nats.Msg) error {
	switch status := m.Header.Get(headerStatus); {
	case status == "" || m.Header.Get(jetstream.StreamHeader) != "":
		return nil
	case status == statusNotFound:
		return ErrNotFound
	case status == statusNoResponders:
		return fmt.Errorf("%w %s", jetstream.ErrNoStreamResponse, stream)
	default:
		return fmt.Errorf("server answers %s %s", status, m.Header.Get(headerDescription))
	}
}

const (
	// multiBatch bounds the messages in one answer to LastMany, multiBytes the bytes.
	multiBatch = 1024
	multiBytes = 8 << 20
)

// LastMany returns the newest message of each subject that the filters match, sorted by sequence, all as of one
// moment. When nothing matches, the list is empty. The stream must be one of the contract, since those allow direct
// gets. The filters match stored subjects.
func (b *Bus) LastMany(ctx context.Context, stream string, filters []string) ([]*Message, error) {
	if len(filters) == 0 {
		return nil, nil
	}
	return b.lastManyFrom(ctx, stream, filters, 0)
}

// lastManyFrom is LastMany of the messages from a sequence on.
func (b *Bus) lastManyFrom(ctx context.Context, stream string, filters []string, from uint64) ([]*Message, error) {
	req := directRequest{MultiLast: filters, Seq: from, Batch: multiBatch, MaxBytes: multiBytes}
	reached, err := b.leaderSeq(ctx, stream)
	if err != nil {
		return nil, fmt.Errorf("last of each subject of %s: %w", stream, err)
	}
	var out []*Message
	for {
		page, upTo, pending, err := b.readUpToDate(ctx, stream, req, reached)
		if errors.Is(err, errTooMany) || errors.Is(err, ErrPermission) || err == nil && pending > 0 && reached > 0 {
			// A direct get has at most 1,024 subjects, a reader any number. In a cluster, each page may come from
			// another server.
			return b.lastPerSubject(ctx, stream, filters, from)
		}
		if err != nil {
			return nil, fmt.Errorf("last of each subject of %s: %w", stream, err)
		}
		out = append(out, page...)
		if len(page) == 0 || pending == 0 {
			return out, nil
		}
		req.Seq, req.UpToSeq = page[len(page)-1].Seq+1, upTo
	}
}

// errTooMany means that the filters of a direct get match more subjects than the server can handle at once.
var errTooMany = errors.New("too many subjects")

// Queued yields the messages of a work queue in order, and leaves them there. Read cannot do that: a consumer of a
// work queue takes its messages away. For a long stream Read is faster.
func (b *Bus) Queued(ctx context.Context, stream string) iter.Seq2[*Message, error] {
	return func(yield func(*Message, error) bool) {
		req := directRequest{Seq: 1, Batch: multiBatch, MaxBytes: multiBytes}
		reached, err := b.leaderSeq(ctx, stream)
		for {
			var page []*Message
			var pending uint64
			if err == nil {
				page, _, pending, err = b.readUpToDate(ctx, stream, req, 0)
			}
			if err != nil {
				if ctx.Err() == nil {
					yield(nil, fmt.Errorf("read %s: %w", stream, err))
				}
				return
			}
			for _, m := range page {
				if !yield(m, nil) {
					return
				}
				req.Seq = m.Seq + 1
			}
			if len(page) > 0 && pending > 0 {
				continue
			}
			var lags bool
			if lags, err = b.leaderHas(ctx, stream, nil, req.Seq, reached); err == nil && !lags {
				return
			}
			if err == nil {
				err = Pause(ctx, lagPause)
			}
		}
	}
}

// readPage returns one page of LastMany, or for Queued of all messages from a sequence on. pending is how many messages
// are left behind the page. upTo, for LastMany only, is the sequence as of which all pages are read.
func (b *Bus) readPage(
	ctx context.Context, stream string, req directRequest,
) (page []*Message, upTo, pending uint64, err error) {
	body, err := json.Marshal(req)
	if err != nil {
		return nil, 0, 0, err
	}
	ctx, stop := context.WithTimeout(ctx, 2*apiTimeout)
	defer stop()
	inbox := b.nc.NewInbox()
	answers := make(chan *nats.Msg, multiBatch+1) // the channel of SubscribeSync would take half a megabyte
	sub, err := b.nc.ChanSubscribe(inbox, answers)
	if err != nil {
		return nil, 0, 0, err
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only on a closed connection
	if err := b.nc.PublishMsg(&nats.Msg{Subject: b.directSubject(stream), Reply: inbox, Data: body}); err != nil {
		return nil, 0, 0, err
	}
	for {
		var m *nats.Msg
		select {
		case m = <-answers:
		case <-ctx.Done():
			return nil, 0, 0, ctx.Err()
		case <-b.closed:
			return nil, 0, 0, nats.ErrConnectionClosed
		}
		switch m.Header.Get(headerStatus) {
		case statusEOB:
			if req.MultiLast != nil {
				if upTo, err = strconv.ParseUint(m.Header.Get(headerUpToSequence), 10, 64); err != nil {
					return nil, 0, 0, fmt.Errorf("header %s: %w", headerUpToSequence, err)
				}
			}
			if pending, err = strconv.ParseUint(m.Header.Get(headerNumPending), 10, 64); err != nil {
				return nil, 0, 0, fmt.Errorf("header %s: %w", headerNumPending, err)
			}
			return page, upTo, pending, nil
		case statusNotFound:
			return nil, 0, 0, nil
		case statusTooMany:
			return nil, 0, 0, errTooMany
		}
		if err := directError(stream, m); err != nil {
			return nil, 0, 0, err
		}
		message, err := parseDirectGet(m)
		if err != nil {
			return nil, 0, 0, err
		}
		page = append(page, message)
	}
}

// Stored returns how many messages of a stream match the filters, from a sequence on. In a cluster it may be too few.
func (b *Bus) Stored(ctx context.Context, stream string, filters []string, from uint64) (n uint64, err error) {
	for _, filter := range filters {
		req := directRequest{Seq: from, Batch: 1, NextFor: filter}
		page, _, pending, err := b.readUpToDate(ctx, stream, req, 0)
		if err != nil {
			return 0, fmt.Errorf("count %s: %w", filter, err)
		}
		n += uint64(len(page)) + pending
	}
	return n, nil
}

// Matching returns how many messages of a stream match one of the filters, of which there may be hundreds: the server
// adds them up by its index. In a cluster it may be too few.
func (b *Bus) Matching(ctx context.Context, stream string, filters []string) (n uint64, err error) {
	err = b.withStream(ctx, stream, func(ctx context.Context, s jetstream.Stream, _ *jetstream.StreamInfo) error {
		c, err := s.OrderedConsumer(ctx, ReadOptions{HeadersOnly: true}.natsConfig(filters))
		if err != nil {
			return err
		}
		n = c.CachedInfo().NumPending
		return s.DeleteConsumer(ctx, c.CachedInfo().Name)
	})
	if err != nil {
		return 0, fmt.Errorf("count what matches in %s: %w", stream, err)
	}
	return n, nil
}

// Subjects returns the stored subjects of a stream that match filter, each with its number of messages; without any
// the map is empty.
func (b *Bus) Subjects(ctx context.Context, stream, filter string) (map[string]uint64, error) {
	state, err := b.streamState(ctx, stream, filter)
	if err != nil {
		return nil, fmt.Errorf("subjects of %s: %w", stream, err)
	}
	if state.Subjects == nil {
		return map[string]uint64{}, nil
	}
	return state.Subjects, nil
}

// streamState returns the state of a stream, with the subjects that match filter.
func (b *Bus) streamState(ctx context.Context, stream, filter string) (state jetstream.StreamState, err error) {
	err = b.withStream(ctx, stream, func(ctx context.Context, s jetstream.Stream, now *jetstream.StreamInfo) error {
		if now != nil && now.State.Msgs == 0 {
			state = now.State
			return nil
		}
		info, err := s.Info(ctx, jetstream.WithSubjectFilter(filter))
		if err == nil {
			state = info.State
		}
		return err
	})
	return state, err
}

// Delete removes the message at a sequence. It is no error when the message is gone already.
func (b *Bus) Delete(ctx context.Context, stream string, seq uint64) error {
	err := b.withStream(ctx, stream, func(ctx context.Context, s jetstream.Stream, _ *jetstream.StreamInfo) error {
		return s.DeleteMsg(ctx, seq)
	})
	if errors.Is(err, jetstream.ErrMsgNotFound) || errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
		// The server reports a message that is not there as a failed delete.
		if _, getErr := b.Get(ctx, stream, seq); errors.Is(getErr, ErrNotFound) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("delete %s %d: %w", stream, seq, err)
	}
	return nil
}

// Purge removes everything stored about a run: prompts, groups, requests, steps, trajectories, verdicts, rewards,
// advantages and batches, and the run's spec. It returns the number of messages removed. Images and other blobs stay,
// because other runs may refer to the same content; dead letters stay for an operator. Do not use the run id again:
// within schemas.DedupWindow the server would treat its events as duplicates and store nothing.
func (b *Bus) Purge(ctx context.Context, run schemas.Run) (uint64, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return 0, fmt.Errorf("purge run: %w", err)
	}
	removed := uint64(0)
	filters := schemas.RunFilters(run)
	for _, stream := range slices.Sorted(maps.Keys(filters)) {
		for _, filter := range filters[stream] {
			n, err := b.PurgeSubject(ctx, stream, filter)
			removed += n
			if err != nil {
				return removed, fmt.Errorf("purge run %q: %w", run, err)
			}
		}
	}
	return removed, b.deleteRun(ctx, run)
}

// PurgeSubject removes the messages whose stored subject matches filter, and returns their number.
func (b *Bus) PurgeSubject(ctx context.Context, stream, filter string) (uint64, error) {
	var answer struct {
		Error  *jetstream.APIError `json:"error"`
		Purged uint64              `json:"purged"`
	}
	body, err := json.Marshal(map[string]string{"filter": filter})
	if err == nil {
		err = b.retryWhileAway(ctx, func(ctx context.Context) error {
			resp, err := b.request(ctx, &nats.Msg{Subject: b.api + "STREAM.PURGE." + stream, Data: body})
			if err == nil {
				err = json.Unmarshal(resp.Data, &answer)
			}
			return err
		})
	}
	if err == nil && answer.Error != nil {
		err = answer.Error
	}
	if err != nil {
		return 0, fmt.Errorf("purge %q of %s: %w", filter, stream, err)
	}
	return answer.Purged, nil
}

// StreamStats is the state of a stream and of its consumers.
type StreamStats struct {
	Name     string `json:"name"`
	Messages uint64 `json:"messages"`
	Bytes    uint64 `json:"bytes"`
	// MaxBytes and MaxMessages are the limits; -1: none. MaxAge is how long a message is
	// kept, in nanoseconds; 0: for ever.
	MaxBytes    int64         `json:"max_bytes"`
	MaxMessages int64         `json:"max_messages"`
	MaxAge      time.Duration `json:"max_age_ns"`
	// State is how full it is: StateOK, StateNearlyFull, StateFull or StateRolling.
	State string `json:"state"`
	// Held, Waiting and Need are only set for MDR_STEPS. Held is the bytes that samples in flight may still store,
	// counted from their first step. Waiting is how many samples wait for space; the first of them needs Need bytes.
	Held    int64 `json:"held_bytes,omitempty"`
	Waiting int64 `json:"waiting_samples,omitempty"`
	// Enough is the limit that would be enough for all that is begun and that waits, if an intake knows it.
	Need   int64 `json:"need_bytes,omitempty"`
	Enough int64 `json:"enough_bytes,omitempty"`
	// OnDisk means that they wait for space on the server's disk.
	OnDisk bool `json:"on_disk,omitempty"`
	// Mirror: it is a copy of a stream of another account or server.
	Mirror bool `json:"mirror,omitempty"`
	// Replicas is how many servers keep the stream, Current how many of them have all of it and of its consumers.
	// Lacking names the servers that do not: they are down, or behind.
	Replicas int      `json:"replicas"`
	Current  int      `json:"current"`
	Lacking  []string `json:"lacking,omitempty"`
	// Oldest and Newest are when the first and the last message were stored; zero for an empty stream.
	Oldest    time.Time       `json:"oldest"`
	Newest    time.Time       `json:"newest"`
	Consumers []ConsumerStats `json:"consumers"`
}

// ConsumerStats is the progress of one durable consumer.
type ConsumerStats struct {
	Name string `json:"name"`
	// Stage is the stage of the pipeline that the durable serves.
	Stage string `json:"stage"`
	// Pending messages wait to be delivered, AckPending are delivered and not acknowledged; Redelivered of those came
	// more than once.
	Pending     uint64 `json:"pending"`
	AckPending  int    `json:"ack_pending"`
	Redelivered int    `json:"redelivered"`
	// Pulls is the number of open requests for messages: a client is at work.
	Pulls int `json:"pulls"`
	// Filters are the subjects that it reads; none: all. Takes means that a message goes to one client and must be
	// acknowledged: services need that, durables that only read do not have it.
	Filters []string `json:"filters,omitempty"`
	Takes   bool     `json:"takes"`
	// Delivered is when it last delivered a message; before the first one, when it was created.
	Delivered time.Time `json:"delivered"`
}

// Stats returns the state of the contract's streams in the order in which data flows, with their durable consumers,
// then of the streams behind the buckets.
func (b *Bus) Stats(ctx context.Context) (out []StreamStats, err error) {
	err = b.retryWhileAway(ctx, func(ctx context.Context) error {
		out, err = b.stats(ctx, true)
		return err
	})
	return out, err
}

// Sizes is Stats without consumers, and at once: an error means that the server did not answer.
func (b *Bus) Sizes(ctx context.Context) ([]StreamStats, error) { return b.stats(ctx, false) }

// stats asks for each stream once, and ends with the first that the server does not tell of.
func (b *Bus) stats(ctx context.Context, withConsumers bool) (out []StreamStats, err error) {
	stores := allStores()
	out = make([]StreamStats, len(stores))
	g, ctx := errgroup.WithContext(ctx)
	for i, k := range stores { // side by side, which spares both ends most of their awakenings
		g.Go(func() error {
			stats, s, err := b.streamStats(ctx, k)
			if err == nil && withConsumers {
				err = b.addConsumers(ctx, stats, s)
			}
			if err == nil {
				out[i] = *stats
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return out, nil
}

// addConsumers adds the durables of a stream to its stats.
func (b *Bus) addConsumers(ctx context.Context, stats *StreamStats, s jetstream.Stream) error {
	if s.CachedInfo().State.Consumers == 0 {
		return nil
	}
	consumers, err := b.consumersOf(ctx, s)
	if err != nil {
		return fmt.Errorf("stats of %s: %w", stats.Name, err)
	}
	for _, c := range consumers {
		if c.Config.Durable != "" {
			stats.countReplicas(c.Cluster)
			delivered := c.Created
			if c.Delivered.Last != nil {
				delivered = *c.Delivered.Last
			}
			stats.Consumers = append(stats.Consumers, ConsumerStats{
				Name: c.Name, Stage: serviceOf(c.Name),
				Pending: c.NumPending, AckPending: c.NumAckPending, Redelivered: c.NumRedelivered, Pulls: c.NumWaiting,
				Filters: filtersOf(c.Config), Delivered: delivered,
				Takes: c.Config.AckPolicy == jetstream.AckExplicitPolicy && c.Config.DeliverSubject == "",
			})
		}
	}
	return nil
}

// consumersOf returns all consumers of a stream. A role that may not list the consumers of others gets only those of
// the pipeline's services. It reads the library's listing to its end: otherwise the listing's goroutine would never
// end.
func (b *Bus) consumersOf(ctx context.Context, s jetstream.Stream) (all []*jetstream.ConsumerInfo, err error) {
	stream := s.CachedInfo().Config
	if !b.user.ListsConsumers(stream.Name) {
		for _, d := range schemas.Durables() {
			if d.Stream != stream.Name {
				continue
			}
			c, err := s.Consumer(ctx, d.Name)
			switch {
			case err == nil:
				all = append(all, c.CachedInfo())
			case !errors.Is(err, jetstream.ErrConsumerNotFound):
				return nil, err
			}
		}
		return all, nil
	}
	list := s.ListConsumers(ctx)
	for c := range list.Info() {
		all = append(all, c)
	}
	return all, list.Err()
}

// countReplicas lowers Current to the number of servers that have all of a stream or consumer, and notes the others
// in Lacking. c is what the server says of its cluster; without one it is one server.
func (stats *StreamStats) countReplicas(c *jetstream.ClusterInfo) {
	n := 1
	if c != nil {
		for _, peer := range c.Replicas {
			switch {
			case peer.Current && !peer.Offline:
				n++
			case !slices.Contains(stats.Lacking, peer.Name):
				stats.Lacking = append(stats.Lacking, peer.Name)
			}
		}
	}
	stats.Current = min(stats.Current, n)
}

// streamStats returns the state of one stream, without its consumers, and the stream.
func (b *Bus) streamStats(ctx context.Context, k storedIn) (*StreamStats, jetstream.Stream, error) {
	s, err := b.js.Stream(ctx, k.name)
	if err != nil {
		return nil, nil, fmt.Errorf("stats of %s: %w", k.name, noLeader(err))
	}
	state, config := s.CachedInfo().State, s.CachedInfo().Config
	stats := &StreamStats{
		Name: k.name, Messages: state.Msgs, Bytes: state.Bytes, MaxBytes: config.MaxBytes, MaxMessages: config.MaxMsgs,
		MaxAge:   config.MaxAge,
		Replicas: config.Replicas, Current: config.Replicas, Consumers: []ConsumerStats{},
	}
	stats.countReplicas(s.CachedInfo().Cluster)
	stats.Mirror = config.Mirror != nil // its oldest events go when it is full, whatever the stream does
	stats.State = stats.fullness(k.refuses && !stats.Mirror)
	if state.Msgs > 0 {
		stats.Oldest, stats.Newest = state.FirstTime, state.LastTime
	}
	if k.name == schemas.StreamSteps && !stats.Mirror { // samples wait for space in the stream
		err = b.addWaitingSamples(ctx, stats)
	}
	return stats, s, err
}
