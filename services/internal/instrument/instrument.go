// Package instrument makes the counters, gauges and histograms of a service for
// Prometheus. A Set makes those of one service. Several services of one process, and
// several copies of one service, share them: equal names are one instrument.
//
// A name is meander_<service>_<what>_<unit>: counters end in _total, histograms in
// _seconds or _ratio, everything else is a gauge.
package instrument

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Set makes the instruments of one service.
type Set struct {
	registry prometheus.Registerer
	service  string
}

// New returns a set on a registry; on nil the instruments count and are not shown.
func New(r prometheus.Registerer, service string) Set {
	if r == nil {
		r = prometheus.NewRegistry()
	}
	return Set{r, service}
}

// Counter returns a counter with one value for each combination of labels. Make known values at the start (Zero): a
// rate cannot be told from a first value.
func (s Set) Counter(name, help string, labels ...string) *prometheus.CounterVec {
	return register(s.registry, prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "meander", Subsystem: s.service, Name: name, Help: help,
	}, labels))
}

// Zero makes values of a counter with one label, so that they are shown from the start.
func Zero(c *prometheus.CounterVec, values ...string) *prometheus.CounterVec {
	for _, v := range values {
		c.WithLabelValues(v)
	}
	return c
}

// Gauge returns a gauge with one value for each combination of labels. Copies of a service add up in it: use Add and
// Sub, not Set.
func (s Set) Gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	return register(s.registry, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Namespace: "meander", Subsystem: s.service, Name: name, Help: help,
	}, labels))
}

// Seconds returns a histogram of times from half a millisecond to half a minute.
func (s Set) Seconds(name, help string, labels ...string) *prometheus.HistogramVec {
	return s.histogram(name, help, prometheus.ExponentialBuckets(0.0005, 2, 16), labels)
}

// Ratio returns a histogram of shares from 0 to 1, in eighths.
func (s Set) Ratio(name, help string, labels ...string) *prometheus.HistogramVec {
	return s.histogram(name, help, prometheus.LinearBuckets(0.125, 0.125, 8), labels)
}

func (s Set) histogram(name, help string, buckets []float64, labels []string) *prometheus.HistogramVec {
	return register(s.registry, prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "meander", Subsystem: s.service, Name: name, Help: help, Buckets: buckets,
	}, labels))
}

// CounterOf shows a counter that is kept elsewhere, with fixed labels. read is called at each scrape; it must be
// quick, and its value must never fall. After stop the last value stays.
func (s Set) CounterOf(name, help string, read func() float64, labels ...prometheus.Labels) (stop func()) {
	return s.sum(name, help, prometheus.CounterValue, labels).add(read, true)
}

// GaugeOf shows a gauge that is kept elsewhere, until stop is called.
func (s Set) GaugeOf(name, help string, read func() float64, labels ...prometheus.Labels) (stop func()) {
	return s.sum(name, help, prometheus.GaugeValue, labels).add(read, false)
}

// sum registers a metric that adds up the values of all copies of a service in this process, or finds the one that an
// earlier copy registered.
func (s Set) sum(name, help string, kind prometheus.ValueType, labels []prometheus.Labels) *sum {
	merged := prometheus.Labels{}
	for _, l := range labels {
		maps.Copy(merged, l)
	}
	return register(s.registry, &sum{
		desc: prometheus.NewDesc(prometheus.BuildFQName("meander", s.service, name), help, nil, merged),
		kind: kind, parts: map[int]func() float64{},
	})
}

// register registers c, or returns what is registered already under its name, so that several copies of a service
// share metrics. It panics if the name has another meaning, which is a mistake in the services.
func register[C prometheus.Collector](r prometheus.Registerer, c C) C {
	err := r.Register(c)
	if err == nil {
		return c
	}
	if have, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if same, ok := have.ExistingCollector.(C); ok {
			return same
		}
	}
	panic(err) // one name, two meanings: a mistake in the services
}

// Fill makes the instruments of a struct: each exported field with a tag metric is one of that name, with the text of
// the tag help and, of a vector, the labels of the tag labels. Its type is prometheus.Counter, Gauge, Observer
// (_ratio: of shares; else of seconds), *CounterVec, *GaugeVec or *HistogramVec (of seconds). Structs in it are filled,
// too. It panics on any other type.
func (s Set) Fill(of any) {
	v := reflect.ValueOf(of).Elem()
	for i := range v.NumField() {
		f, tag := v.Field(i), v.Type().Field(i).Tag
		name, help, labels := tag.Get("metric"), tag.Get("help"), strings.Fields(tag.Get("labels"))
		if name == "" {
			if f.Kind() == reflect.Struct && v.Type().Field(i).IsExported() {
				s.Fill(f.Addr().Interface())
			}
			continue
		}
		switch to := f.Addr().Interface().(type) {
		case *prometheus.Counter:
			*to = s.Counter(name, help).WithLabelValues()
		case *prometheus.Gauge:
			*to = s.Gauge(name, help).WithLabelValues()
		case **prometheus.CounterVec:
			*to = s.Counter(name, help, labels...)
		case **prometheus.GaugeVec:
			*to = s.Gauge(name, help, labels...)
		case **prometheus.HistogramVec:
			*to = s.Seconds(name, help, labels...)
		case *prometheus.Observer:
			if strings.HasSuffix(name, "_ratio") {
				*to = s.Ratio(name, help).WithLabelValues()
			} else {
				*to = s.Seconds(name, help).WithLabelValues()
			}
		default:
			panic(fmt.Sprintf("instrument: %s: a %s", name, f.Type()))
		}
	}
}

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
