// dns answers for the cluster's Services, and for nothing else: the cluster's network has no way out.
//
// It knows A records of Services (their ClusterIP; for headless ones the ready endpoints) and of endpoints with a host
// name, which are a StatefulSet's pods. Names outside the cluster's domain don't exist.
//
// usage: dns KUBECONFIG ADDRESS:PORT DOMAIN
package main

import (
	"context"
	"encoding/binary"
	"io"
	"log"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	ttlSeconds   = 5
	smallestUDP  = 512
	largestUDP   = 1232
	idleTimeout  = 10 * time.Second
	largestQuery = 4096
)

type server struct {
	domain   string // with dots on both sides
	services corelisters.ServiceLister
	slices   discoverylisters.EndpointSliceLister
}

// lookup gives a name's addresses, and whether the name exists at all.
func (s *server) lookup(name string) ([]net.IP, bool) {
	name = strings.ToLower(name)
	rest, found := strings.CutSuffix(name, ".svc"+s.domain)
	if !found {
		return nil, false
	}
	parts := strings.Split(rest, ".")
	if len(parts) != 2 && len(parts) != 3 {
		return nil, false
	}
	namespace, service := parts[len(parts)-1], parts[len(parts)-2]
	object, err := s.services.Services(namespace).Get(service)
	if err != nil {
		return nil, false
	}
	if len(parts) == 3 {
		ips := s.endpoints(namespace, service, parts[0])
		return ips, len(ips) > 0
	}
	if object.Spec.ClusterIP != corev1.ClusterIPNone {
		return []net.IP{net.ParseIP(object.Spec.ClusterIP)}, true
	}
	return s.endpoints(namespace, service, ""), true
}

// endpoints are the ready addresses behind a Service, all or those of one host name.
func (s *server) endpoints(namespace, service, hostname string) []net.IP {
	selector := labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: service})
	found, err := s.slices.EndpointSlices(namespace).List(selector)
	if err != nil {
		return nil
	}
	var ips []net.IP
	for _, slice := range found {
		for _, endpoint := range slice.Endpoints {
			if endpoint.Conditions.Ready != nil && !*endpoint.Conditions.Ready {
				continue
			}
			if hostname != "" && (endpoint.Hostname == nil || *endpoint.Hostname != hostname) {
				continue
			}
			for _, address := range endpoint.Addresses {
				ips = append(ips, net.ParseIP(address))
			}
		}
	}
	return ips
}

// answer gives the reply to one query, or nil for what is no query at all. limit is the longest reply that the
// transport takes; 0 means that the query says so itself.
func (s *server) answer(query []byte, limit int) []byte {
	var parser dnsmessage.Parser
	header, err := parser.Start(query)
	if err != nil || header.Response {
		return nil
	}
	question, err := parser.Question()
	if err != nil {
		return nil
	}
	if limit == 0 {
		limit = udpLimit(&parser)
	}
	reply := dnsmessage.Message{
		Header: dnsmessage.Header{
			ID: header.ID, Response: true, Authoritative: true,
			RecursionDesired: header.RecursionDesired, RecursionAvailable: true,
		},
		Questions: []dnsmessage.Question{question},
	}
	ips, exists := s.lookup(question.Name.String())
	if !exists {
		reply.RCode = dnsmessage.RCodeNameError
	}
	if question.Type == dnsmessage.TypeA || question.Type == dnsmessage.TypeALL {
		for _, ip := range ips {
			if four := ip.To4(); four != nil {
				reply.Answers = append(reply.Answers, dnsmessage.Resource{
					Header: dnsmessage.ResourceHeader{Name: question.Name, Class: dnsmessage.ClassINET, TTL: ttlSeconds},
					Body:   &dnsmessage.AResource{A: [4]byte(four)},
				})
			}
		}
	}
	packed, err := reply.Pack()
	if err == nil && len(packed) > limit {
		reply.Truncated, reply.Answers = true, nil
		packed, err = reply.Pack()
	}
	if err != nil {
		log.Print(err)
		return nil
	}
	return packed
}

// udpLimit reads what the asker can take from the query's last section (EDNS).
func udpLimit(parser *dnsmessage.Parser) int {
	if parser.SkipAllQuestions() != nil || parser.SkipAllAnswers() != nil || parser.SkipAllAuthorities() != nil {
		return smallestUDP
	}
	for {
		header, err := parser.AdditionalHeader()
		if err != nil {
			return smallestUDP
		}
		if header.Type == dnsmessage.TypeOPT {
			return min(max(int(header.Class), smallestUDP), largestUDP)
		}
		if parser.SkipAdditional() != nil {
			return smallestUDP
		}
	}
}

func (s *server) serveUDP(address string) error {
	connection, err := net.ListenPacket("udp4", address)
	if err != nil {
		return err
	}
	buffer := make([]byte, largestQuery)
	for {
		n, from, err := connection.ReadFrom(buffer)
		if err != nil {
			return err
		}
		if reply := s.answer(buffer[:n], 0); reply != nil {
			connection.WriteTo(reply, from)
		}
	}
}

func (s *server) serveTCP(address string) error {
	listener, err := net.Listen("tcp4", address)
	if err != nil {
		return err
	}
	for {
		connection, err := listener.Accept()
		if err != nil {
			return err
		}
		go s.serveConnection(connection)
	}
}

func (s *server) serveConnection(connection net.Conn) {
	defer connection.Close()
	for {
		connection.SetDeadline(time.Now().Add(idleTimeout))
		var length uint16
		if binary.Read(connection, binary.BigEndian, &length) != nil || length > largestQuery {
			return
		}
		query := make([]byte, length)
		if _, err := io.ReadFull(connection, query); err != nil {
			return
		}
		reply := s.answer(query, 1<<16-1)
		if reply == nil {
			return
		}
		if _, err := connection.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil {
			return
		}
	}
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: dns KUBECONFIG ADDRESS:PORT DOMAIN")
	}
	config, err := clientcmd.BuildConfigFromFlags("", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Fatal(err)
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	s := &server{
		domain:   "." + os.Args[3] + ".",
		services: factory.Core().V1().Services().Lister(),
		slices:   factory.Discovery().V1().EndpointSlices().Lister(),
	}
	factory.Start(context.Background().Done())
	factory.WaitForCacheSync(context.Background().Done())
	go func() { log.Fatal(s.serveTCP(os.Args[2])) }()
	log.Fatal(s.serveUDP(os.Args[2]))
}
