package instrument

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/micro"
)

// Work counts what the copies of a service in this process have handled of one kind, as service discovery shows it.
type Work struct {
	mu    sync.Mutex
	stats micro.EndpointStats
}

var works struct {
	sync.Mutex
	of map[string]map[string]*Work
}

// Work returns the counts of a kind of work of the service: of a subject, or of a stream's durable consumer, the queue.
func (s Set) Work(name, subject, queue string) *Work {
	works.Lock()
	defer works.Unlock()
	if works.of == nil {
		works.of = map[string]map[string]*Work{}
	}
	if works.of[s.service] == nil {
		works.of[s.service] = map[string]*Work{}
	}
	w := works.of[s.service][name]
	if w == nil {
		w = &Work{stats: micro.EndpointStats{Name: name, Subject: subject, QueueGroup: queue}}
		works.of[s.service][name] = w
	}
	return w
}

// Done counts what began at a time and has ended, with an error or nil. What a stop of the service ended is not
// counted.
func (w *Work) Done(ctx context.Context, began time.Time, err error) {
	if err != nil && ctx.Err() != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stats.NumRequests++
	w.stats.ProcessingTime += time.Since(began)
	if err != nil {
		w.stats.NumErrors++
		w.stats.LastError = err.Error()
	}
}

// WorkOf returns the counts of a service, by name.
func WorkOf(service string) (all []*micro.EndpointStats) {
	works.Lock()
	defer works.Unlock()
	for _, w := range works.of[service] {
		w.mu.Lock()
		stats := w.stats
		w.mu.Unlock()
		stats.AverageProcessingTime = stats.ProcessingTime / time.Duration(max(1, stats.NumRequests))
		all = append(all, &stats)
	}
	slices.SortFunc(all, func(a, b *micro.EndpointStats) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
