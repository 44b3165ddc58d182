// forward joins two network namespaces: it accepts on a listening socket that it inherited (made in the machine's
// namespace) and connects from its own (the cluster's). So the API server is on the machine's loopback, too, without
// any link between the two networks.
//
// usage: forward FD TARGET
package main

import (
	"io"
	"log"
	"net"
	"os"
	"strconv"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: forward FD TARGET")
	}
	fd, err := strconv.Atoi(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.FileListener(os.NewFile(uintptr(fd), "listener"))
	if err != nil {
		log.Fatal(err)
	}
	for {
		client, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go relay(client.(*net.TCPConn), os.Args[2])
	}
}

// relay copies both ways. The end of one direction is passed on, so that half-closed connections stay usable.
func relay(client *net.TCPConn, target string) {
	defer client.Close()
	connection, err := net.Dial("tcp", target)
	if err != nil {
		// The client sees a reset, as it would from a server that is down.
		client.SetLinger(0)
		return
	}
	server := connection.(*net.TCPConn)
	defer server.Close()
	done := make(chan struct{})
	go func() {
		io.Copy(server, client)
		server.CloseWrite()
		close(done)
	}()
	io.Copy(client, server)
	client.CloseWrite()
	<-done
}
