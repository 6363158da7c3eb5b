package instrument

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// sum is one value to which all copies of a service add.
type sum struct {
	desc *prometheus.Desc
	kind prometheus.ValueType

	mu    sync.Mutex
	ended float64 // what stopped copies had counted
	next  int
	parts map[int]func() float64
}

// add adds a copy's value to the sum until stop is called; if stays, as for a counter, its last value remains in the
// sum.
func (s *sum) add(read func() float64, stays bool) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := s.next
	s.next++
	s.parts[id] = read
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if stays {
			s.ended += read()
		}
		delete(s.parts, id)
	}
}

func (s *sum) Describe(ch chan<- *prometheus.Desc) { ch <- s.desc }

// Collect sends the sum over all copies; Prometheus calls it at each scrape.
func (s *sum) Collect(ch chan<- prometheus.Metric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value := s.ended
	for _, read := range s.parts {
		value += read()
	}
	ch <- prometheus.MustNewConstMetric(s.desc, s.kind, value)
}
